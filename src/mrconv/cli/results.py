"""mrconv results: recorded results beside the paper's, and the table of probes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .parser import CommandError, optional_imports

DEFAULT = ("results", "runs")
PROBES = Path("results/probes")


def add(commands: Any) -> None:
    """Add the parser."""
    about = "print a table of recorded results beside the paper's"
    parser = commands.add_parser("results", help=about, description=about.capitalize() + ".")
    add_result_folders(parser)
    what = f"print a table of probes instead, short trainings with one change; default folder: ./{PROBES}"
    parser.add_argument("--probes", action="store_true", help=what)
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table to a file, with all columns")
    what = "write the paper's accuracies of all models to a file, with our runs below each"
    parser.add_argument("--baselines", type=Path, metavar="FILE.md", help=what)
    parser.add_argument("--peers", dest="baselines", type=Path, help=argparse.SUPPRESS)  # codespell:ignore peers
    parser.set_defaults(run=run)


def add_result_folders(parser: argparse.ArgumentParser) -> None:
    """Add the argument FOLDER ... of recorded runs."""
    default = " and ".join(f"./{name}" for name in DEFAULT)
    what = f"folders to search for result.json files; default: {default}, if they exist"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=what)


def collect_results(folders: list[Path]) -> list[dict[str, Any]]:
    """Return the results under the folders, or under the default ones."""
    folders = folders or [Path(name) for name in DEFAULT if Path(name).is_dir()]
    if not folders:
        raise CommandError(f"no {' or '.join(DEFAULT)} folder here: give the folders of the runs")
    from mrconv.training import result_files

    results = result_files.collect(folders)
    if not results:
        raise CommandError(f"no {result_files.RESULT} under {', '.join(map(str, folders))}: no run there has ended")
    return results


def run(given: argparse.Namespace) -> None:
    """Read the records, print the table, write the files."""
    if given.probes and given.baselines:
        raise CommandError("argument --baselines: not with --probes, which are not compared with the paper")
    try:
        with optional_imports("`mrconv results`", "train"):
            _tabulate_probes(given) if given.probes else _tabulate_results(given)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _tabulate_results(given: argparse.Namespace) -> None:
    results = collect_results(given.folders)
    from mrconv.training import report

    print(report.table(results))
    _write("markdown", given.markdown, lambda: report.markdown(results))
    _write("baselines", given.baselines, lambda: report.baseline_table(results))


def _tabulate_probes(given: argparse.Namespace) -> None:
    from mrconv.training import probes

    folders = given.folders or [PROBES]
    found = probes.find_probes(folders)
    if not found:
        raise CommandError(f"no folder with config.yaml and metrics.csv under {', '.join(map(str, folders))}")
    print(probes.table(found))
    _write("markdown", given.markdown, lambda: probes.markdown(found))


def _write(option: str, path: Path | None, make: Callable[[], str]) -> None:
    """Write the file of an option, if it was given."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"argument --{option}: cannot write {path}: {error.strerror}") from None
    print(f"\nwrote {path}")
