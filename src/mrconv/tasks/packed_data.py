"""Prepared data that travels: one compressed file with the arrays of a task and the options that determine them."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from .._utils.files import atomic_write
from .archives import copy_exactly, tar_files
from .base import Prepared, Task, task
from .cache import METADATA, drafted, is_complete
from .errors import DataError
from .progress_callback import Progress, no_progress
from .reading import CHUNK, MAX_FILE_MIB, Expansion, limited, reading

TASK = "task.json"
MEMBER = re.compile(r"[a-z]+\.[a-z0-9]+\.npy|" + re.escape(METADATA))
COMPRESSIONS = {".tar.xz": "xz", ".tar.bz2": "bz2"}
NOT_PACKED = "is damaged, or was not written by `mrconv data pack`"


def compression(out: Path) -> str:
    """Return the compression that the name of a packed file chooses; raise ValueError for another name."""
    for suffix, name in COMPRESSIONS.items():
        if out.name.endswith(suffix):
            return name
    raise ValueError(f"the name of packed data must end in {' or '.join(COMPRESSIONS)}; got {out}")


def pack(packed: Task, out: Path, progress: Progress = no_progress) -> None:
    """Write the prepared arrays of a task to a file, atomically: a .tar.xz or, larger but faster, a .tar.bz2."""
    mode: Any = f"w:{compression(out)}"
    folder = packed.prepare().folder
    assert folder is not None
    content = json.dumps({"task": packed.name, "options": packed.options()}, default=str).encode()
    files = sorted(folder.iterdir())
    total, done = sum(path.stat().st_size for path in files), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as draft, tarfile.open(draft, mode) as tar:
        header = tarfile.TarInfo(TASK)
        header.size = len(content)
        tar.addfile(header, io.BytesIO(content))
        for path in files:
            tar.add(path, path.name)
            done += path.stat().st_size
            progress(done, total)


def unpack(file: Path, data_dir: Path, cache_dir: Path | None = None, max_mib: int = MAX_FILE_MIB) -> Task:
    """Put packed arrays into the cache and return their task; the file is checked before anything is written there.

    The arrays may have `max_mib` MiB in all, or 200 times the size of the file.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist")
    with limited(max_mib, "--max-mib"):
        return _unpack(file, data_dir, cache_dir)


def _unpack(file: Path, data_dir: Path, cache_dir: Path | None) -> Task:
    members, expansion = tar_files(file, NOT_PACKED), Expansion(file)
    name, size, stream = next(members, ("", 0, io.BytesIO()))
    if name != TASK or size > CHUNK:
        raise DataError(f"{file} was not written by `mrconv data pack`: it does not begin with {TASK}")
    with reading(file, NOT_PACKED):
        described = json.loads(stream.read(size))
        unpacked = task(described["task"], data_dir, cache_dir=cache_dir, **described["options"])
    with drafted(unpacked.unpacked_folder()) as draft:
        for name, size, stream in members:
            if MEMBER.fullmatch(name) is None:
                raise DataError(f"{file} was not written by `mrconv data pack`: it holds {name!r}")
            expansion.add(size)
            with (draft / name).open("wb") as target:
                copy_exactly(stream, target, size, f"{file}: {name}", NOT_PACKED)
        if not is_complete(draft):
            raise DataError(f"{file} is incomplete: it holds no {METADATA}")
        _check_tokens(unpacked.load(draft), file)
    return unpacked


def _check_tokens(data: Prepared, file: Path) -> None:
    """Raise DataError for tokens that are not in the vocabulary: an embedding would read outside of its weights."""
    for split in data.splits.values() if data.vocabulary else ():
        for x in (split.x, split.x2):
            if x is not None and len(x) and not 0 <= x.min() <= x.max() < len(data.vocabulary):
                raise DataError(f"{file}: the tokens of {split.name} must lie in 0 .. {len(data.vocabulary) - 1}")
