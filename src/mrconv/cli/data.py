"""`mrconv data`: list the tasks, prepare their data and show examples."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrconv._utils.progress_bar import progress_bar

from .parser import CommandError, command_errors, optional_imports, positive
from .task_arguments import add_folder_arguments, add_task_arguments, data_dir, make_task


def add(commands: Any) -> None:
    """Add the parser."""
    about = "prepare benchmark data and look at it"
    parser = commands.add_parser("data", help=about, description=about.capitalize() + ".")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    about = "list the tasks and whether their data is available"
    list_parser = actions.add_parser("list", help=about, description=about.capitalize() + ".")
    add_folder_arguments(list_parser)
    list_parser.set_defaults(run=run_list)
    about = "read or generate a task's data into the cache"
    prepare = actions.add_parser("prepare", help=about, description=about.capitalize() + ".")
    add_task_arguments(prepare)
    prepare.add_argument("--download", action="store_true", help="download the files first, if they are public")
    prepare.set_defaults(run=run_prepare)
    about = "write a task's prepared data to a file that another machine can unpack, without its sources"
    pack = actions.add_parser("pack", help=about, description=about.capitalize() + ".")
    add_task_arguments(pack, out="file that is written, .tar.xz or, larger but faster, .tar.bz2")
    pack.set_defaults(run=run_pack)
    about = "put packed data into the cache, where the task with the same options finds it"
    unpack = actions.add_parser("unpack", help=about, description=about.capitalize() + ".")
    unpack.add_argument("file", type=Path, metavar="FILE", help="file that `mrconv data pack` wrote")
    what = "largest size of the arrays, unless it is less than 200 times that of the file; default: 1024"
    unpack.add_argument("--max-mib", type=positive, default=1024, metavar="N", help=what)
    add_folder_arguments(unpack)
    unpack.set_defaults(run=run_unpack)
    about = "show a task's counts, class balance, lengths and an example"
    show = actions.add_parser("show", help=about, description=about.capitalize() + ".")
    add_task_arguments(show)
    show.add_argument("--split", help="split of the example; default: the first")
    show.add_argument("--example", type=int, default=0, metavar="I", help="index of the example; default: 0")
    show.add_argument("--row", type=int, dest="example", help=argparse.SUPPRESS)  # the former name of --example
    show.add_argument("--out", type=Path, metavar="FILE.png", help="draw some examples into this file")
    show.set_defaults(run=run_show)


def run_list(args: argparse.Namespace) -> None:
    """Print all tasks with their options."""
    from mrconv import tasks
    from mrconv._utils.plugins import load_entry_points

    load_entry_points()
    for name in tasks.task_names():
        cls = tasks.task_class(name)
        task = cls(data_dir(args), args.cache_dir)
        try:
            state = "prepared" if task.is_prepared() else "found" if task.sources() else "generated"
        except tasks.DataError:
            state = "missing"
        print(f"{name:12s} {state:10s} {cls.title}")
        fields = [f for f in dataclasses.fields(cls) if f.name not in ("data_dir", "cache_dir")]
        options = ", ".join(f"{f.name}={f.default}" for f in fields)
        print(f"{'':23s} {options}")


def run_prepare(args: argparse.Namespace) -> None:
    """Prepare a task's data; print a summary and the folder."""
    from mrconv.tasks import preview

    with command_errors():
        task = make_task(args)
        if args.download:
            with progress_bar("downloading", "bytes") as progress:
                task.download(progress)
        with progress_bar(f"preparing {task.name}") as progress:
            data = task.prepare(progress)
        print(preview.summary(data))
        print(f"\nin {data.folder}")


def run_pack(args: argparse.Namespace) -> None:
    """Pack a task's data; print the file."""
    from mrconv.tasks import packed_data

    with command_errors():
        task = make_task(args)
        packed_data.compression(args.file)  # rejects a name before the data is prepared
        with progress_bar(f"preparing {task.name}") as progress:
            task.prepare(progress)
        with progress_bar(f"packing {task.name}", "bytes") as progress:
            packed_data.pack(task, args.file, progress)
    print(f"{args.file}: {args.file.stat().st_size / 2**20:.1f} MiB")


def run_unpack(args: argparse.Namespace) -> None:
    """Unpack a task's data; print the folder."""
    from mrconv.tasks import packed_data

    with command_errors():
        task = packed_data.unpack(args.file, data_dir(args), args.cache_dir, args.max_mib)
        print(f"{task.name} in {task.unpacked_folder()}")


def run_show(args: argparse.Namespace) -> None:
    """Print a summary of a task's data and one example."""
    from mrconv.tasks import preview

    with command_errors():
        with progress_bar(f"preparing {args.task}") as progress:
            data = make_task(args).prepare(progress)
        name = args.split or next(iter(data.splits))
        if name not in data.splits:
            raise CommandError(f"argument --split: {args.task} has {', '.join(data.splits)}; got {name!r}")
        split = data.splits[name]
        if not 0 <= args.example < len(split):
            raise CommandError(f"argument --example: {name} has examples 0 .. {len(split) - 1}; got {args.example}")
        print(preview.summary(data))
        print("\n" + preview.describe_example(data, split, args.example))
        if args.out is not None:
            _save_figure(preview.draw_examples, data, args.out)


def _save_figure(draw: Callable[[Any, Path], None], data: Any, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with optional_imports("a figure", "plot"):
            draw(data, out)
    except (OSError, ValueError) as error:
        raise CommandError(f"argument --out: cannot write {out}: {error}") from None
    print(out)
