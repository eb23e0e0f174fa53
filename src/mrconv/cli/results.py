"""mrconv results: what runs reached, beside the paper."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import CommandError

DEFAULT = ("results", "runs")


def add(commands: Any) -> None:
    """Add the parser."""
    about = "tabulate the results of runs, beside the paper's"
    parser = commands.add_parser("results", help=about, description=about.capitalize() + ".")
    default = " and ".join(f"./{name}" for name in DEFAULT)
    what = f"looked through for result.json files; default: {default}, if there"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=what)
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table there too, with all columns")
    what = "write the paper's accuracies of all models there, with those of the runs beneath"
    parser.add_argument("--peers", type=Path, metavar="FILE.md", help=what)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Find, tabulate, print."""
    folders = given.folders or [Path(name) for name in DEFAULT if Path(name).is_dir()]
    if not folders:
        raise CommandError(f"there is no {' or '.join(DEFAULT)} folder here: name the folders of the runs")
    try:
        from mrconv.training import report as results
    except ImportError as error:
        raise CommandError(f"`mrconv results` needs {error.name}: pip install 'mrconv[train]'") from None
    try:
        rows = results.collect(folders)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if not rows:
        raise CommandError(f"no {results.RESULT} under {', '.join(map(str, folders))}: no run there has ended")
    print(results.table(rows))
    for option, make in (("markdown", results.markdown), ("peers", results.beside_peers)):
        path = getattr(given, option)
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(rows), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"argument --{option}: cannot write {path}: {error.strerror}") from None
        print(f"\nwritten to {path}")
