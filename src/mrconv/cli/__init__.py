"""The `mrconv` command.

A subcommand is one module here, listed in COMMANDS. Its `add(commands)` makes a parser whose default `run` is a
function of what was parsed; that function imports torch, if it needs it, and raises CommandError for what the user can
put right.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import mrconv

from . import bench, data, evaluate, export, generate, info, plot, predict, results, serve, train
from .parser import CommandError, Parser

__all__ = ["CommandError", "main"]

COMMANDS = (train, evaluate, predict, generate, export, serve, results, plot, info, data, bench)


def _place(given: argparse.Namespace, rest: Sequence[str]) -> None:
    """Put KEY=VALUE words that follow an option where those before it are."""
    room = next((getattr(given, name) for name in ("settings", "options") if hasattr(given, name)), None)
    if rest and (room is None or any(word.startswith("-") or "=" not in word for word in rest)):
        given.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if room is not None:
        room.extend(rest)


def _nobody_reads() -> int:
    """End quietly, as `mrconv ... | head` expects: what is still to be written, at exit too, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # what a shell tells of a command that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["plot"]:
        argv[1:] = plot.spelled_out(argv[1:])
    parser = Parser(prog="mrconv", description="Reparameterized multi-resolution convolutions for long sequences.")
    parser.add_argument("--version", action="version", version=f"mrconv {mrconv.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    given, rest = parser.parse_known_args(argv)
    _place(given, rest)
    given.command = shlex.join(["mrconv", *argv])
    try:
        given.run(given)
        sys.stdout.flush()
    except (BrokenPipeError, CommandError) as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            return _nobody_reads()
        given.parser.error(str(error))
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        return 130
    return 0
