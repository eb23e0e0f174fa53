"""`mrconv run`: pack a run to resume it on another machine, or keep the record of a finished one."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from .parser import command_errors, optional_imports

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add(commands: Any) -> None:
    """Add the parser."""
    about = "pack a run to resume it on another machine, or keep the record of a finished one"
    parser = commands.add_parser("run", help=about, description=about.capitalize() + ".")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    about = "write what a run needs to resume as files of limited size, with checksums"
    pack = actions.add_parser("pack", help=about, description=about.capitalize() + ".")
    pack.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    pack.add_argument("out", type=Path, metavar="OUT", help="folder that is created")
    pack.add_argument(
        "--max-file", type=size, default=2**30, metavar="SIZE", help="largest file, such as 16MiB; default: 1GiB"
    )
    pack.add_argument(
        "--bfloat16-moments",
        action="store_true",
        help="round the optimizer's moments: smaller, and not bit-exact; the result records it",
    )
    pack.set_defaults(run=run_pack)
    about = "restore a packed run; `mrconv train` with the same settings then resumes it"
    unpack = actions.add_parser("unpack", help=about, description=about.capitalize() + ".")
    unpack.add_argument("packed", type=Path, metavar="PACKED", help="folder that `mrconv run pack` wrote")
    unpack.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN", help="folder that is created; default: runs/NAME"
    )
    unpack.set_defaults(run=run_unpack)
    about = "copy settings, scores and trained model of a finished run, without checkpoints"
    record = actions.add_parser("record", help=about, description=about.capitalize() + ".")
    record.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    record.add_argument("out", type=Path, metavar="OUT", help="folder in which the run's record is created")
    record.add_argument(
        "--bfloat16", action="store_true", help="round the weights of linear layers and embeddings: about half the size"
    )
    record.set_defaults(run=run_record)


def size(text: str) -> int:
    """Parse a size in bytes, KiB, MiB or GiB."""
    match = re.fullmatch(r"(\d+) ?(|B|KiB|MiB|GiB)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 16MiB; got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def run_pack(given: argparse.Namespace) -> None:
    """Pack a run; print where."""
    with optional_imports("`mrconv run`", "train"):
        from mrconv.training import packed_run
    with command_errors():
        manifest = packed_run.pack(given.folder, given.out, given.max_file, given.bfloat16_moments)
    parts = manifest["parts"]
    total = sum(part["bytes"] for part in parts)
    print(f"{given.out}: {manifest['run']} at step {manifest['step']}, {total / 2**20:.1f} MiB in {len(parts)} file(s)")


def run_unpack(given: argparse.Namespace) -> None:
    """Unpack a run; print where, and the command that resumes it."""
    with optional_imports("`mrconv run`", "train"):
        from mrconv.training import packed_run
    with command_errors():
        folder, step = packed_run.unpack(given.packed, given.folder)
    print(f"{folder}: at step {step}; the command that started the run resumes it there")


def run_record(given: argparse.Namespace) -> None:
    """Copy the record of a run; print where."""
    with optional_imports("`mrconv run`", "train"):
        from mrconv.training import recorded_run
    with command_errors():
        folder = recorded_run.record(given.folder, given.out, given.bfloat16)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total / 2**20:.1f} MiB")
