"""mrconv report: one page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import add_plugins, command_errors, optional_imports


def add(commands: Any) -> None:
    """Add the parser."""
    about = "write one page about a run that needs no other file: scores, curves, kernels, predictions, settings"
    parser = commands.add_parser("report", help=about, description=about.capitalize() + ".")
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: RUN/report.html")
    add_plugins(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Write the page; print its path."""
    with optional_imports("`mrconv report`", "train"):
        from mrconv.training.html_report import write_report
    out = given.out or given.folder / "report.html"
    with command_errors():
        write_report(given.folder, out)
    print(out)
