"""mrconv train: train a model, evaluate it, merge it and record the run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .parser import CommandError, Parser, optional_imports

ABOUT = """Train a model, evaluate it, merge it and record the run in OUT/NAME-seedSEED. NAME is the experiment's,
followed by its variant and the settings that differ from it, for example listops-base-dilated-lr0.01. The same command
resumes an interrupted run from its last checkpoint."""
MORE = """
examples:
  mrconv train experiment=listops-base
  mrconv train experiment=listops-base variant=ablation-dense
  mrconv train experiment=image-base seed=1 precision=bfloat16
  mrconv train -m experiment=listops-base variant=dilated,fourier,fourier-sparse seed=1,2,3
  mrconv train task=folder data=recordings/ depth=4 d_model=64 epochs=20

`mrconv train --list` prints the experiments and their variants, `mrconv train --keys` every key with its default and
meaning.
"""


def add(commands: Any) -> None:
    """Add the parser."""
    parser: Parser = commands.add_parser(
        "train",
        help="train a model on a task",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="experiment=NAME, variant=NAME, and settings that differ from it",
    )
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="a sweep: KEY=VALUE,VALUE,... runs all combinations"
    )
    parser.add_argument("--list", action="store_true", help="print the experiments with their variants, and exit")
    parser.add_argument("--keys", action="store_true", help="print every key with its default and meaning, and exit")
    parser.add_argument("--show", action="store_true", help="print every value of the experiment, and exit")
    parser.set_defaults(run=run, large_tensors=True)


def run(given: argparse.Namespace) -> None:
    """Check the settings, then train."""
    with optional_imports("training", "train"):
        from mrconv.training import composition
    if given.list:
        print(_presets())
        return
    if given.keys:
        from mrconv.training.experiment import describe_keys

        print(describe_keys())
        return
    try:
        sweeps = [text for text in given.settings if text.startswith("sweep=")]
        if sweeps and not given.multirun:
            raise CommandError(f"{sweeps[0]} is a sweep: add -m")
        if not given.settings and not given.show:
            raise CommandError("nothing to train: give experiment=NAME (--list prints them), or task=NAME and settings")
        if given.multirun:
            experiments = composition.compose_sweep(given.settings)
        else:
            experiments = [composition.compose(given.settings)]
        for out in {experiment.out for experiment in experiments}:
            if Path(out).exists() and not Path(out).is_dir():
                raise CommandError(f"out={out}: Not a directory")
        if given.show:
            _print(experiments)
        else:
            composition.launch(given.settings, given.multirun, _job)
    except composition.JobFailed as error:
        raise CommandError(f"jobs of the sweep failed, see above; the first: {error}") from error
    except composition.FAILURES as error:
        raise CommandError(str(error)) from error


def _presets() -> str:
    """Return a table of all experiments with their variants."""
    from mrconv.training.presets import experiment_names, variants

    names = experiment_names()
    width = 2 + max(map(len, names))
    lines = [f"{'experiment':{width}}variants"]
    for name in names:
        listed = textwrap.wrap(", ".join(variants(name)), 118 - width, break_on_hyphens=False)
        lines += [f"{'' if i else name:{width}}{text}".rstrip() for i, text in enumerate(listed or [""])]
    return "\n".join(lines)


def _print(experiments: Sequence[Any]) -> None:
    import dataclasses

    import yaml

    if not experiments:
        raise CommandError("argument --show: the sweeper of this sweep chooses its jobs while it runs")
    print(yaml.safe_dump_all(map(dataclasses.asdict, experiments), sort_keys=False), end="")


def _job(experiment: Any, folder: Path) -> None:
    """Train one experiment in its folder."""
    from safetensors import SafetensorError

    from mrconv._utils.progress_bar import progress_bar
    from mrconv.tasks.progress_callback import Progress, no_progress
    from mrconv.training.loop import train
    from mrconv.training.module import NonFiniteError
    from mrconv.training.rundir import is_rank_zero

    _check_backend(experiment)
    bar: AbstractContextManager[Progress] = progress_bar(f"preparing {experiment.task}")
    preparing = bar if is_rank_zero() else nullcontext(no_progress)
    try:
        with _interruptible(folder), preparing as count:
            result = train(experiment, folder, count)
    except NonFiniteError as error:
        raise ValueError(str(error)) from error
    except SafetensorError as error:
        raise OSError(f"{folder}: cannot write the model: {error}") from error
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(f"{folder}: {error.strerror}") from error
    if result:
        print_result(result, folder)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Make Ctrl-C stop a run as SIGTERM does: after the current step, with a checkpoint. A second one stops at once."""
    from mrconv.training.checkpoint_files import LAST
    from mrconv.training.rundir import is_rank_zero

    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not callable(signal.getsignal(signal.SIGTERM)):  # training has not started, or has ended
            raise KeyboardInterrupt
        os.write(2, b"\nstopping after this step (Ctrl-C again: at once)\n")  # print is not reentrant
        os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        last = folder / LAST
        next_start = f"resumes from {last}" if last.exists() else "starts again, as there is no checkpoint yet"
        if interrupted:
            message = KeyboardInterrupt(f"stopped; the same command {next_start}")
            raise message if is_rank_zero() else SystemExit(130) from None
        if stop.args == (143,) and is_rank_zero():
            print(f"stopped by SIGTERM; the same command {next_start}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _check_backend(experiment: Any) -> None:
    """Reject backend=triton where Triton cannot run."""
    import torch

    from mrconv.ops import triton_unavailable

    device = "cuda" if experiment.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    if experiment.backend == "triton" and (why_not := triton_unavailable(torch.empty(0, device=device))):
        raise ValueError(f"backend=triton cannot run here: {why_not}")


def print_result(result: dict[str, Any], folder: Path) -> None:
    """Print a run's result beside the paper's."""
    from mrconv.training.paper_numbers import published_for_run
    from mrconv.training.report import on_generated_data
    from mrconv.training.scores import SCORES

    metric = SCORES[result.get("metric", "accuracy")]
    split = "test" if "test" in result[metric.name] else "val"
    score, merged = (metric.text(result[key][split]) for key in (metric.name, f"merged_{metric.name}"))
    done = f" ({result['epochs_done']} of {result['epochs']} epochs done)" if result["partial"] else ""
    epoch = f"best epoch {result['best_epoch']}"
    if result.get("stopped_early"):
        epoch += f", stopped early after {result['epochs_done']} of {result['epochs']} epochs"
    if used := result.get("substitution"):
        epoch = f"epoch {result['best_epoch']} ({used['used']} instead of {used['instead_of']}: {used['why']})"
    if best := result.get("best_on_test"):
        epoch = f"last epoch; best on test {metric.text(best[metric.name])} at epoch {best['epoch']}"
    print(f"\n{result['name']}: {split} {score}, merged {merged}, {epoch}{done}")
    paper = published_for_run(result)
    if paper is not None and paper.accuracy is not None:
        data = "; this run: generated data" if on_generated_data(result) else ""
        print(
            f"the paper: {paper.accuracy:.2f} %; best baseline: {paper.baseline}, {paper.baseline_accuracy:.2f} %{data}"
        )
    print(f"in {folder}: result.json, metrics.csv, model/, merged/, figures/")
