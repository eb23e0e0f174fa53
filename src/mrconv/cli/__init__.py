"""The `mrconv` command.

A subcommand is one module here, listed in COMMANDS. Its `add(commands)` makes a parser whose default `run` is a
function of what was parsed; that function imports torch, if it needs it, and raises CommandError for what the user can
put right.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import mrconv

from . import bench, data, evaluate, plot, results, train
from .parser import CommandError, Parser

__all__ = ["CommandError", "main"]

COMMANDS = (train, evaluate, results, plot, data, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(prog="mrconv", description="Reparameterized multi-resolution convolutions for long sequences.")
    parser.add_argument("--version", action="version", version=f"mrconv {mrconv.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    given = parser.parse_args(argv)
    given.command = shlex.join(["mrconv", *argv])
    try:
        given.run(given)
    except CommandError as error:
        given.parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
