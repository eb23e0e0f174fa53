"""Command-line arguments that name a task, its options and its folders."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parser import CommandError, Parser, add_plugins

if TYPE_CHECKING:
    from mrconv.tasks import Task


def add_folder_arguments(parser: Parser) -> None:
    """Add --data-dir, --cache-dir and --plugins."""
    default = "default: $MRCONV_DATA, else ./data"
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=f"folder of the data files; {default}")
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="folder of the prepared arrays; default: cache in the data folder"
    )
    add_plugins(parser)


def add_task_arguments(parser: Parser, out: str | None = None) -> None:
    """Add a task, its options and the folders; with `out`, its explanation, a file too."""
    parser.add_argument("task", metavar="TASK", help="see `mrconv data list`")
    if out is not None:
        parser.add_argument("file", type=Path, metavar="FILE", help=out)
    parser.add_argument(
        "options", nargs="*", metavar="OPTION=VALUE", help="options of the task; see `mrconv data list`"
    )
    add_folder_arguments(parser)


def data_dir(args: argparse.Namespace) -> Path:
    """Return the folder of the data files."""
    return args.data_dir or Path(os.environ.get("MRCONV_DATA") or "data")


def make_task(args: argparse.Namespace) -> Task:
    """Return the task that the arguments name, with its options."""
    from mrconv import tasks

    try:
        defaults = {f.name: f.default for f in dataclasses.fields(tasks.task_class(args.task))}
        options = dict(parse_option(text, defaults) for text in args.options)
        return tasks.task(args.task, data_dir(args), cache_dir=args.cache_dir, **options)
    except ValueError as error:
        raise CommandError(str(error)) from None


def parse_option(text: str, defaults: dict[str, Any]) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value has the type of the option's default."""
    name, sign, value = text.partition("=")
    if not sign:
        raise CommandError(f"expected an option as NAME=VALUE; got {text!r}")
    if name in ("data_dir", "cache_dir"):
        raise CommandError(f"{name} is not an option of a task; use --{name.replace('_', '-')} DIR")
    default = defaults.get(name)
    try:
        if isinstance(default, bool):
            return name, {"true": True, "false": False}[value.lower()]
        return name, type(default)(value) if isinstance(default, int | float) else value
    except (KeyError, ValueError):
        expected = "true or false" if isinstance(default, bool) else f"a number like {default}"
        raise CommandError(f"option {name} takes {expected}; got {value!r}") from None
