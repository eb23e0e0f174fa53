"""mrconv plot: figures of recorded results."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from .parser import CommandError

RUN = "run"
BENCHMARKS = {
    "length": "time against length",
    "compare": "the speed of all mixers beside S4's, and against length",
    "vision": "the paper's accuracies against images/s",
}


def add(commands: Any) -> None:
    """Add the parser."""
    about = "draw recorded results"
    parser = commands.add_parser("plot", help=about, description=about.capitalize() + ".")
    figures = parser.add_subparsers(title="figures", metavar="FIGURE", required=True)
    for name, what in BENCHMARKS.items():
        what += f", from what `mrconv bench {name} --out FILE.json` recorded"
        recorded = figures.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        recorded.add_argument("file", type=Path, metavar="FILE.json")
        recorded.add_argument("--out", type=Path, metavar="FILE.png", help="default: FILE.png beside FILE.json")
        recorded.set_defaults(run=run_recorded, benchmark=name)
    what = "a run's learning curves, the weights of its resolutions and its merged kernels (on pictures, as maps)"
    trained = figures.add_parser(RUN, help=what, description=what[0].upper() + what[1:] + ".")
    trained.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    trained.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/figures")
    trained.set_defaults(run=run_run)


def spelled_out(words: list[str]) -> list[str]:
    """Return `run RUN` for what follows `mrconv plot` if that is a folder alone."""
    return [RUN, *words] if words and words[0] not in (RUN, *BENCHMARKS) and Path(words[0]).is_dir() else words


def run_run(given: argparse.Namespace) -> None:
    """Draw all that a run folder has the data for."""
    if not given.folder.is_dir():
        raise CommandError(f"{given.folder} is no folder")
    try:
        from mrconv.training.figures import draw_run
    except ImportError as error:
        raise CommandError(f"`mrconv plot run` needs {error.name}: pip install 'mrconv[train]'") from None
    try:
        for path in draw_run(given.folder, given.out):
            print(path)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot draw {given.folder}: {error}") from None


def run_recorded(given: argparse.Namespace) -> None:
    """Read, check, draw."""
    try:
        found = json.loads(given.file.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {given.file}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{given.file} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("benchmark") != given.benchmark:
        raise CommandError(f"{given.file} was not recorded by `mrconv bench {given.benchmark}`")
    if not found["rows"]:
        raise CommandError(f"{given.file} has no rows: the run was stopped before its first {given.benchmark} was done")
    if given.benchmark == "compare":
        measured = [row[name] for row in found["rows"] for name in ("training", "inference") if name in row]
        if not measured or any("s4" not in results for results in measured):
            raise CommandError(f"{given.file} has no times of S4 in training or inference to compare with")
    out = given.out or given.file.with_suffix(".png")
    try:
        plot = importlib.import_module("mrconv.bench.charts")
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise CommandError("plots need matplotlib: pip install 'mrconv[plot]'") from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        getattr(plot, f"plot_{given.benchmark}")(found, out)
    except (OSError, ValueError) as error:
        raise CommandError(f"argument --out: cannot write {out}: {error}") from None
    print(out)
