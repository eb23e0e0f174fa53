"""Prepared data that travels: one compressed file with the arrays of a task and the options that determine them."""

from __future__ import annotations

import io
import json
import lzma
import re
import shutil
import tarfile
from pathlib import Path
from typing import IO, Any

from .._utils.files import atomic_write
from .base import Task, task
from .cache import METADATA, drafted, is_complete
from .errors import DataError
from .progress_callback import Progress, no_progress

TASK = "task.json"
MEMBER = re.compile(r"[a-z]+\.[a-z0-9]+\.npy|" + re.escape(METADATA))


def pack(packed: Task, out: Path, progress: Progress = no_progress) -> None:
    """Write the prepared arrays of a task to a .tar.xz file, atomically."""
    folder = packed.prepare().folder
    assert folder is not None
    content = json.dumps({"task": packed.name, "options": packed.options()}, default=str).encode()
    files = sorted(folder.iterdir())
    total, done = sum(path.stat().st_size for path in files), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as draft, tarfile.open(draft, "w:xz") as tar:
        header = tarfile.TarInfo(TASK)
        header.size = len(content)
        tar.addfile(header, io.BytesIO(content))
        for path in files:
            tar.add(path, path.name)
            done += path.stat().st_size
            progress(done, total)


def unpack(file: Path, data_dir: Path, cache_dir: Path | None = None) -> Task:
    """Put packed arrays into the cache and return their task; the file is checked before anything is written there."""
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        with tarfile.open(file, "r:xz") as tar:
            return _unpack(tar, file, data_dir, cache_dir)
    except (tarfile.TarError, lzma.LZMAError, EOFError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is damaged, or was not written by `mrconv data pack`: {error}") from error


def _unpack(tar: tarfile.TarFile, file: Path, data_dir: Path, cache_dir: Path | None) -> Task:
    first = tar.next()
    if first is None or first.name != TASK:
        raise DataError(f"{file} was not written by `mrconv data pack`: it does not begin with {TASK}")
    described: dict[str, Any] = json.load(_opened(tar, first))
    unpacked = task(described["task"], data_dir, cache_dir=cache_dir, **described["options"])
    with drafted(unpacked.unpacked_folder()) as draft:
        while (member := tar.next()) is not None:
            if not member.isfile() or MEMBER.fullmatch(member.name) is None:
                raise DataError(f"{file} was not written by `mrconv data pack`: it holds {member.name!r}")
            with (draft / member.name).open("wb") as target:
                shutil.copyfileobj(_opened(tar, member), target)
        if not is_complete(draft):
            raise DataError(f"{file} is incomplete: it holds no {METADATA}")
    return unpacked


def _opened(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    opened = tar.extractfile(member)
    assert opened is not None
    return opened
