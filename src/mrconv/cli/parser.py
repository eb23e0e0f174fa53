"""Shared parts of the commands: the argument parser, its types and one-line errors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from mrconv._utils.extras import needs


class CommandError(Exception):
    """An error that the user can correct: printed in one line, exit code 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors and without abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see `{self.prog} --help`)\n")


@contextmanager
def command_errors() -> Iterator[None]:
    """Raise errors in data, values and files as CommandError."""
    from mrconv.tasks import DataError

    try:
        yield
    except (DataError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error


@contextmanager
def optional_imports(user: str, extra: str) -> Iterator[None]:
    """Raise a failed import as a CommandError that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise CommandError(needs(user, error.name, extra)) from None


def positive(text: str) -> int:
    """Parse a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return value


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Add --plugins, whose modules `main` imports before it runs the command."""
    what = "import these modules, which register kernels, mixers and tasks; a folder's record never imports code"
    parser.add_argument("--plugins", type=_split, action="extend", default=[], metavar="MODULE,...", help=what)


def _split(text: str) -> list[str]:
    return text.split(",")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, which `usable_device` reads."""
    parser.add_argument("--device", help="default: cuda if available, else cpu")


def usable_device(name: str | None) -> str:
    """Return the device of this name, by default the best available; reject a device that torch cannot use."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CommandError(f"argument --device: cannot use {device!r}: torch finds no CUDA device; use --device cpu")
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CommandError(f"argument --device: cannot use {device!r}: {str(error).splitlines()[0]}") from None
    return device
