"""mrconv data: the benchmark tasks, their files, and what is in them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .parser import CommandError, Parser, command_errors, optional_imports


def add(commands: Any) -> None:
    """Add the parser."""
    about = "prepare benchmark data and look at it"
    parser = commands.add_parser("data", help=about, description=about.capitalize() + ".")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    what = "list the tasks, and which of them have their data here"
    listed = actions.add_parser("list", help=what, description=what.capitalize() + ".")
    _folders(listed)
    listed.set_defaults(run=run_list)
    what = "read or generate a task's data into the cache"
    prepare = actions.add_parser("prepare", help=what, description=what.capitalize() + ".")
    _task(prepare)
    prepare.add_argument("--download", action="store_true", help="fetch the files first, where that can be done")
    prepare.set_defaults(run=run_prepare)
    what = "show a task's counts, class balance, lengths and an example"
    show = actions.add_parser("show", help=what, description=what.capitalize() + ".")
    _task(show)
    show.add_argument("--split", help="of the example; default: the first")
    show.add_argument("--row", type=int, default=0, metavar="I", help="the example; default: 0")
    show.add_argument("--out", type=Path, metavar="FILE.png", help="draw some examples there")
    show.set_defaults(run=run_show)


def _folders(parser: Parser) -> None:
    default = "default: $MRCONV_DATA, else ./data"
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=f"where the files are; {default}")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where prepared arrays go; default: DIR/cache")


def _task(parser: Parser) -> None:
    parser.add_argument("task", metavar="TASK", help="`mrconv data list` names them")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the task; `mrconv data list` names them")
    _folders(parser)


def run_list(given: argparse.Namespace) -> None:
    """Print all tasks."""
    from mrconv import tasks

    for name in tasks.task_names():
        cls = tasks.task_class(name)
        task = cls(data_dir(given), given.cache_dir)
        try:
            state = "prepared" if (task.folder() / "meta.json").exists() else "here" if task.sources() else "generated"
        except tasks.DataError:
            state = "missing"
        print(f"{name:12s} {state:10s} {cls.title}")
        fields = [f for f in dataclasses.fields(cls) if f.name not in ("data_dir", "cache_dir")]
        options = ", ".join(f"{f.name}={f.default}" for f in fields)
        print(f"{'':23s} {options}")


def run_prepare(given: argparse.Namespace) -> None:
    """Prepare a task and say where it is."""
    from mrconv import tasks

    with command_errors():
        task = make(given)
        if given.download:
            with _progress("downloading", "bytes") as count:
                task.download(count)
        with _progress(f"preparing {task.name}") as count:
            data = task.prepare(count)
        print(tasks.show.summary(data))
        print(f"\nin {data.folder}")


def run_show(given: argparse.Namespace) -> None:
    """Print what a task's data looks like."""
    from mrconv import tasks

    with command_errors():
        with _progress(f"preparing {given.task}") as count:
            data = make(given).prepare(count)
        name = given.split or next(iter(data.splits))
        if name not in data.splits:
            raise CommandError(f"argument --split: {given.task} has {', '.join(data.splits)}; got {name!r}")
        split = data.splits[name]
        if not 0 <= given.row < len(split):
            raise CommandError(f"argument --row: {name} has rows 0 .. {len(split) - 1}; got {given.row}")
        print(tasks.show.summary(data))
        print("\n" + tasks.show.example(data, split, given.row))
        if given.out is not None:
            _draw(tasks.show.figure, data, given.out)


def _draw(draw: Callable[[Any, Path], None], data: Any, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(data, out)
    except ImportError as error:
        raise CommandError(f"pictures need {error.name}: pip install 'mrconv[plot]'") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"argument --out: cannot write {out}: {error}") from None
    print(out)


def make(given: argparse.Namespace) -> Any:
    """Return the task that was asked for, with its options."""
    from mrconv import tasks

    try:
        kinds = {f.name: f.default for f in dataclasses.fields(tasks.task_class(given.task))}
        options = dict(_option(text, kinds) for text in given.options)
        return tasks.task(given.task, data_dir(given), cache_dir=given.cache_dir, **options)
    except ValueError as error:
        raise CommandError(str(error)) from None


def data_dir(given: argparse.Namespace) -> Path:
    """Return the folder the files are in."""
    return given.data_dir or Path(os.environ.get("MRCONV_DATA") or "data")


def _option(text: str, defaults: dict[str, Any]) -> tuple[str, Any]:
    """Parse name=value as the kind of value that the option's default is."""
    name, sign, value = text.partition("=")
    if not sign:
        raise CommandError(f"options are written NAME=VALUE; got {text!r}")
    default = defaults.get(name)
    try:
        if isinstance(default, bool):
            return name, {"true": True, "false": False}[value.lower()]
        return name, type(default)(value) if isinstance(default, int | float) else value
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else f"a number like {default}"
        raise CommandError(f"option {name} takes {kind}; got {value!r}") from None


def _progress(description: str, unit: str = "items") -> AbstractContextManager[Callable[[int, int | None], None]]:
    """Return a progress bar."""
    with optional_imports("`mrconv data`", "data"):
        from mrconv._utils.progress_bar import progress_bar

        return progress_bar(description, unit)
