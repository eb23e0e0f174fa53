"""The `mrconv` command.

Each subcommand is a module of this package, listed in COMMANDS. Its `add(commands)` adds a parser whose default `run`
is a function of the parsed arguments. That function imports torch if it needs it, and raises CommandError for errors
that the user can correct. With the default `large_tensors=True` the process keeps freed memory for the next tensors.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import mrconv
from mrconv._utils.allocator import keep_freed_memory
from mrconv._utils.plugins import load_plugins

from . import bench, data, evaluate, export, generate, info, plot, predict, report, results, run, serve, train
from .parser import CommandError, Parser, command_errors

__all__ = ["CommandError", "main"]

COMMANDS = (train, evaluate, predict, generate, export, serve, results, report, run, plot, info, data, bench)


def _add_rest(given: argparse.Namespace, rest: Sequence[str]) -> None:
    """Append words that follow an option, which argparse does not, to the list of those before it."""
    name = next((name for name in ("settings", "options", "files", "folders") if hasattr(given, name)), None)
    paths = name in ("files", "folders")
    options = [word for word in rest if word.startswith("-") and word != "-"]
    if rest and (name is None or options or not (paths or all("=" in word for word in rest))):
        given.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if name is not None:
        getattr(given, name).extend(map(Path, rest) if paths else rest)


def _closed_pipe() -> int:
    """Discard the remaining output, as `mrconv ... | head` expects; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # the code that shells report for a command that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    own_process = argv is None
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["plot"]:
        argv[1:] = plot.with_figure_name(argv[1:])
    parser = Parser(prog="mrconv", description="Reparameterized multi-resolution convolutions for long sequences.")
    parser.add_argument("--version", action="version", version=f"mrconv {mrconv.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    given, rest = parser.parse_known_args(argv)
    _add_rest(given, rest)
    given.command = shlex.join(["mrconv", *argv])
    if own_process and getattr(given, "large_tensors", False):
        keep_freed_memory()
    try:
        if plugins := getattr(given, "plugins", []):
            with command_errors():
                load_plugins(plugins)
        given.run(given)
        sys.stdout.flush()
    except (BrokenPipeError, CommandError) as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            return _closed_pipe()
        given.parser.error(str(error))
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        return 130
    return 0
