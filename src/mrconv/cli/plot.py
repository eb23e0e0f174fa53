"""mrconv plot: figures of recorded results."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from mrconv._utils.extras import needs

from .parser import CommandError, add_plugins, optional_imports
from .results import add_result_folders, collect_results

RUN, ACCURACY = "run", "accuracy"
BENCHMARKS = {
    "length": "time against length",
    "compare": "the speed of all mixers relative to S4, and against length",
    "vision": "the paper's accuracies against images/s",
}


def add(commands: Any) -> None:
    """Add the parser."""
    about = "plot recorded results"
    parser = commands.add_parser("plot", help=about, description=about.capitalize() + ".")
    figures = parser.add_subparsers(title="figures", metavar="FIGURE", required=True)
    for name, what in BENCHMARKS.items():
        what += f", from a file of `mrconv bench {name} --out FILE.json`"
        recorded = figures.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        recorded.add_argument("file", type=Path, metavar="FILE.json")
        recorded.add_argument("--out", type=Path, metavar="FILE.png", help="default: FILE.png beside FILE.json")
        recorded.set_defaults(run=plot_benchmark, benchmark=name)
    what = "a run's learning curves, the weights of its resolutions and its merged kernels (of images, as maps)"
    trained = figures.add_parser(RUN, help=what, description=what[0].upper() + what[1:] + ".")
    trained.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    trained.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/figures")
    add_plugins(trained)
    trained.set_defaults(run=plot_run)
    what = "test accuracy against training time, a panel for each task"
    accuracy = figures.add_parser(ACCURACY, help=what, description=what[0].upper() + what[1:] + ".")
    add_result_folders(accuracy)
    default = Path("accuracy.png")
    accuracy.add_argument("--out", type=Path, default=default, metavar="FILE.png", help=f"default: {default}")
    accuracy.set_defaults(run=plot_accuracy)


def with_figure_name(words: list[str]) -> list[str]:
    """Return the arguments of `mrconv plot`, with `run` before an argument that is a folder."""
    return (
        [RUN, *words] if words and words[0] not in (RUN, ACCURACY, *BENCHMARKS) and Path(words[0]).is_dir() else words
    )


def plot_run(given: argparse.Namespace) -> None:
    """Plot all figures that the files of a run folder allow."""
    if not given.folder.is_dir():
        raise CommandError(f"{given.folder} is not a folder")
    with optional_imports("`mrconv plot run`", "train"):
        from mrconv.training.figures import draw_run
    try:
        for path in draw_run(given.folder, given.out):
            print(path)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot plot {given.folder}: {error}") from None


def plot_accuracy(given: argparse.Namespace) -> None:
    """Plot the records of runs."""
    with optional_imports("`mrconv plot accuracy`", "train"):
        from mrconv.training.results_figure import plot_accuracies
    try:
        plot_accuracies(collect_results(given.folders), given.out)
    except OSError as error:
        raise CommandError(f"argument --out: cannot write {given.out}: {error}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    print(given.out)


def plot_benchmark(given: argparse.Namespace) -> None:
    """Read a recorded benchmark, check it, plot it."""
    recorded = _read(given.file, given.benchmark)
    out = given.out or given.file.with_suffix(".png")
    try:
        charts = importlib.import_module("mrconv.bench.charts")
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise CommandError(needs("a plot", "matplotlib", "plot")) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        getattr(charts, f"plot_{given.benchmark}")(recorded, out)
    except (OSError, ValueError) as error:
        raise CommandError(f"argument --out: cannot write {out}: {error}") from None
    print(out)


def _read(file: Path, benchmark: str) -> dict[str, Any]:
    """Return a recorded benchmark; reject a file that holds no measurements of it."""
    try:
        recorded = json.loads(file.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{file} is not JSON: {error}") from None
    if not isinstance(recorded, dict) or recorded.get("benchmark") != benchmark:
        raise CommandError(f"{file} was not recorded by `mrconv bench {benchmark}`")
    if not recorded["rows"]:
        raise CommandError(f"{file} has no measurements: the benchmark was stopped before its first result")
    if benchmark == "compare":
        measured = [row[name] for row in recorded["rows"] for name in ("training", "inference") if name in row]
        if not measured or any("s4" not in results for results in measured):
            raise CommandError(f"{file} has no times of S4 in training or inference to compare with")
    return recorded
