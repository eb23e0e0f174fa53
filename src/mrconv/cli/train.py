"""mrconv train: one command for a trained, evaluated, merged model and the record of how it was made."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .parser import CommandError, Parser

ABOUT = """Train a model, evaluate it, merge it and record how it was made, in OUT/NAME-seedSEED (of a sweep, in
OUT/NAME/0, 1, ...). Started again, a run goes on from its last checkpoint."""
MORE = """
examples:
  mrconv train experiment=listops-base
  mrconv train experiment=image-base seed=1 precision=bfloat16
  mrconv train -m experiment=listops-base seed=1,2,3
  mrconv train task=folder data=recordings/ depth=4 d_model=64 epochs=20

`mrconv train --list` prints the experiments, `mrconv train --keys` every key with its default and meaning.
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
        "settings", nargs="*", metavar="KEY=VALUE", help="experiment=NAME first, then what differs from it"
    )
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="a sweep: KEY=VALUE,VALUE,... runs all combinations"
    )
    parser.add_argument("--list", action="store_true", help="print the ready experiments and leave")
    parser.add_argument("--keys", action="store_true", help="print every key with its default and meaning, and exit")
    parser.add_argument("--show", action="store_true", help="print the experiment as it would run and leave")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Check the settings, then train."""
    try:
        from mrconv.training import presets as compose
    except ImportError as error:
        raise CommandError(f"training needs {error.name}: pip install 'mrconv[train]'") from None
    if given.list:
        print("\n".join(compose.experiment_names()))
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
            raise CommandError("what is to be trained? experiment=NAME (--list names them), or task=NAME and settings")
        experiments = compose.composed_all(given.settings) if given.multirun else [compose.composed(given.settings)]
        if given.show:
            _print(experiments)
        else:
            compose.launch(given.settings, given.multirun, _job)
    except compose.JobFailed as error:
        raise CommandError(f"jobs failed, each told where it ran; the first: {error}") from error
    except compose.FAILURES as error:
        raise CommandError(str(error)) from error


def _print(experiments: Sequence[Any]) -> None:
    import dataclasses

    import yaml

    if not experiments:
        raise CommandError("argument --show: the jobs of this sweep are chosen by its sweeper while it runs")
    print(yaml.safe_dump_all(map(dataclasses.asdict, experiments), sort_keys=False), end="")


def _job(experiment: Any, folder: Path) -> None:
    """Train one."""
    from safetensors import SafetensorError

    from mrconv._utils.progress_bar import progress_bar
    from mrconv.training.loop import train
    from mrconv.training.module import NotFinite

    _check_backend(experiment)
    try:
        with _interruptible(folder), progress_bar(f"preparing {experiment.task}") as count:
            result = train(experiment, folder, count)
    except NotFinite as error:
        raise ValueError(str(error)) from error
    except SafetensorError as error:
        raise OSError(f"{folder}: the model cannot be written: {error}") from error
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(f"{folder}: {error.strerror}") from error
    if result:
        tell(result, folder)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Have Ctrl-C stop a run as a scheduler does, after a step and with a checkpoint; a second one stops at once."""
    from mrconv.training.checkpoints import LAST
    from mrconv.training.rundir import first_process

    asked = False

    def ask(*_: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not callable(signal.getsignal(signal.SIGTERM)):  # there is no training yet, or no more
            raise KeyboardInterrupt
        os.write(2, b"\nstopping after this step (Ctrl-C again: at once)\n")  # print may be interrupted by itself
        os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        last = folder / LAST
        where = f"goes on from {last}" if last.exists() else "begins again, as there is no checkpoint yet"
        if asked:
            told = KeyboardInterrupt(f"stopped; the same command {where}")
            raise told if first_process() else SystemExit(130) from None
        if stop.args == (143,) and first_process():
            print(f"stopped by SIGTERM; the same command {where}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _check_backend(experiment: Any) -> None:
    """Refuse Triton where it cannot run."""
    import torch

    from mrconv.ops.backends import triton_unavailable

    place = "cuda" if experiment.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    if experiment.backend == "triton" and (why_not := triton_unavailable(torch.empty(0, device=place))):
        raise ValueError(f"backend=triton cannot run here: {why_not}")


def tell(result: dict[str, Any], folder: Path) -> None:
    """Print a run's result."""
    from mrconv.training import paper_numbers as paper
    from mrconv.training.scores import SCORES

    metric = SCORES[result.get("metric", "accuracy")]
    split = "test" if "test" in result[metric.name] else "val"
    score, merged = (metric.text(result[key][split]) for key in (metric.name, f"merged_{metric.name}"))
    done = f" of {result['epochs_done']} done, of {result['epochs']}" if result["partial"] else ""
    print(f"\n{result['name']}: {split} {score}, merged {merged}, best epoch {result['best_epoch']}{done}")
    known = paper.published(result["name"])
    if known is not None and known.accuracy is not None:
        print(f"the paper: {known.accuracy:.2f} %; best peer: {known.peer}, {known.peer_accuracy:.2f} %")
    print(f"in {folder}: result.json, metrics.csv, model/, merged/, figures/")
