#!/usr/bin/env bash
# Train on a machine that is available for a while and keeps nothing: run a list of jobs, and save what they have done.
#
#   bash examples/queue.sh JOBS SECONDS SAVED [PACKED ...]
#
# A line of the file JOBS has a job's time limit and the arguments of mrconv, separated by spaces:
#
#   25m train experiment=pathfinder-base seed=1
#
# The first call unpacks the runs in the folders PACKED, which `mrconv run pack` wrote, and starts the jobs in the
# background, one after another; they go on after the call. Each call waits until all jobs have ended, at most SECONDS.
# Then the folder SAVED has the record of every run in runs/ that is finished, and a pack of every other one, also while
# it trains; the status is 1 if one could not be saved. A file of another name starts further jobs. To stop all:
# kill -- -$(cat runs/.queue/JOBS/pid). $MRCONV is the command; default: mrconv.
set -eu
[ $# -ge 3 ] || { sed -n 's/^#   bash/usage: bash/p' "$0" >&2; exit 2; }
jobs=$1 seconds=$2 saved=$3
shift 3
export MRCONV=${MRCONV:-mrconv}
state=runs/.queue/$(basename "$jobs")
[ -r "$jobs" ] || { echo "$0: cannot read $jobs" >&2; exit 2; }

if [ ! -e "$state" ]; then
  for packed in "$@"; do
    $MRCONV run unpack "$packed"
  done
  mkdir -p "$state"
  cp "$jobs" "$state/jobs"
  : > "$state/output"
  # shellcheck disable=SC2016  # the inner shell expands them
  setsid nohup bash -f -c '
    while read -r limit arguments || [ -n "$limit" ]; do
      case $limit in "" | "#"*) continue ;; esac
      echo "$(date +%T) mrconv $arguments"
      timeout --foreground "$limit" $MRCONV $arguments < /dev/null >> "$0/output" 2>&1 && status=0 || status=$?
      echo "$(date +%T) status $status: $(tail -n 1 "$0/output")"
    done < "$0/jobs"
    touch "$0/ended"' "$state" > "$state/log" 2>&1 &
  echo $! > "$state/pid"
elif ! cmp -s "$jobs" "$state/jobs"; then
  echo "$0: other jobs named $(basename "$jobs") have been started here: give the file another name" >&2
  exit 2
fi

running() { [ ! -e "$state/ended" ] && kill -0 "$(cat "$state/pid")" 2> /dev/null; }
end=$((SECONDS + seconds))
while running && [ $SECONDS -lt $end ]; do
  sleep 0.5
done

mkdir -p "$saved"
new=$saved/.new status=0
for run in runs/*/; do
  run=${run%/}
  name=$(basename "$run")
  [ -e "$run/last.ckpt" ] || continue
  rm -rf "$new"
  if [ -e "$run/result.json" ] && $MRCONV run record "$run" "$new" > /dev/null 2>&1; then
    kept=$name
  elif $MRCONV run pack "$run" "$new/packed-$name" --max-file 16MiB > /dev/null; then
    kept=packed-$name
  else
    status=1
    continue
  fi
  rm -rf "${saved:?}/$name" "${saved:?}/packed-$name"
  mv "$new/$kept" "$saved/$kept"
  echo "$saved/$kept"
done
rm -rf "$new"
cat "$state/log"
if running; then echo "jobs go on: $(tail -n 1 "$state/output")"; fi
exit $status
