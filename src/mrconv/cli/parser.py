"""argparse with one-line errors."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class CommandError(Exception):
    """Something the user can put right, told in one line; exit code 2."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no shortened options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (`{self.prog} --help` tells more)\n")


def positive(text: str) -> int:
    """Parse a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return value


def device(name: str | None) -> str:
    """Return the device of this name, or the best there is; refuse one that torch cannot use."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros((), device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CommandError(f"argument --device: cannot use {chosen!r}: {str(error).splitlines()[0]}") from None
    return chosen
