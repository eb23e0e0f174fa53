"""mrconv results: recorded results beside the paper's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import CommandError

DEFAULT = ("results", "runs")


def add(commands: Any) -> None:
    """Add the parser."""
    about = "print a table of recorded results beside the paper's"
    parser = commands.add_parser("results", help=about, description=about.capitalize() + ".")
    default = " and ".join(f"./{name}" for name in DEFAULT)
    what = f"folders to search for result.json files; default: {default}, if they exist"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=what)
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table to a file, with all columns")
    what = "write the paper's accuracies of all models to a file, with our runs below each"
    parser.add_argument("--baselines", type=Path, metavar="FILE.md", help=what)
    parser.add_argument("--peers", dest="baselines", type=Path, help=argparse.SUPPRESS)  # codespell:ignore peers
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Read the results, print the table, write the files."""
    folders = given.folders or [Path(name) for name in DEFAULT if Path(name).is_dir()]
    if not folders:
        raise CommandError(f"no {' or '.join(DEFAULT)} folder here: give the folders of the runs")
    try:
        from mrconv.training import report, result_files
    except ImportError as error:
        raise CommandError(f"`mrconv results` needs {error.name}: pip install 'mrconv[train]'") from None
    try:
        results = result_files.collect(folders)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if not results:
        raise CommandError(f"no {result_files.RESULT} under {', '.join(map(str, folders))}: no run there has ended")
    print(report.table(results))
    for option, make in (("markdown", report.markdown), ("baselines", report.baseline_table)):
        path = getattr(given, option)
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(results), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"argument --{option}: cannot write {path}: {error.strerror}") from None
        print(f"\nwrote {path}")
