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
# it trains. Another file of JOBS starts further jobs. To stop all: kill -- -$(cat runs/.queue/JOBS/pid).
# $MRCONV is the command; default: mrconv.
set -eu
[ $# -ge 3 ] || { sed -n 's/^#   bash/usage: bash/p' "$0" >&2; exit 2; }
jobs=$1 seconds=$2 saved=$3
shift 3
export MRCONV=${MRCONV:-mrconv}
state=runs/.queue/$(basename "$jobs")

if [ ! -e "$state" ]; then
  [ -r "$jobs" ] || { echo "$0: cannot read $jobs" >&2; exit 2; }
  for packed in "$@"; do
    $MRCONV run unpack "$packed"
  done
  mkdir -p "$state"
  cp "$jobs" "$state/jobs"
  : > "$state/output"
  # shellcheck disable=SC2016  # the inner shell expands them
  setsid nohup bash -c '
    while read -r limit arguments || [ -n "$limit" ]; do
      [ -n "$limit" ] || continue
      echo "$(date +%T) mrconv $arguments"
      timeout --foreground "$limit" $MRCONV $arguments < /dev/null >> "$0/output" 2>&1 && status=0 || status=$?
      echo "$(date +%T) status $status: $(tail -n 1 "$0/output")"
    done < "$0/jobs"
    touch "$0/ended"' "$state" > "$state/log" 2>&1 &
  echo $! > "$state/pid"
fi

end=$((SECONDS + seconds))
while [ ! -e "$state/ended" ] && [ $SECONDS -lt $end ]; do
  sleep 0.5
done

mkdir -p "$saved"
for run in runs/*/; do
  run=${run%/}
  [ -e "$run/last.ckpt" ] || continue
  name=$(basename "$run")
  rm -rf "${saved:?}/$name" "${saved:?}/packed-$name"
  if ! { [ -e "$run/result.json" ] && $MRCONV run record "$run" "$saved" 2> /dev/null; }; then
    $MRCONV run pack "$run" "$saved/packed-$name" --max-file 16MiB || echo "$run is not saved" >&2
  fi
done
cat "$state/log"
[ -e "$state/ended" ] || echo "jobs go on: $(tail -n 1 "$state/output")"
