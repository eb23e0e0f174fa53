"""A cache of prepared data: folders of memory-mapped arrays, written atomically.

The name of a folder contains a hash of everything that determines its arrays: the task, its options and its source
files. A folder is written under a temporary name and renamed when it is complete and on the disk. An interrupted
process therefore leaves no folder that looks complete, and the first of two concurrent writers wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError
from .reading import reading

FORMAT = 1
METADATA = "meta.json"
DRAFT = re.compile(r"\.[\w-]+-[0-9a-f]{12}-[a-z0-9_]{8}")
"""Names of drafts: a dot, the folder's name, and what mkdtemp appends."""
DAMAGED_CACHE, REMOVE_CACHE = "is damaged", "remove this folder, and the data is prepared again"
Arrays = dict[str, np.ndarray]
Built = tuple[Mapping[str, Arrays], dict[str, Any]]
"""Arrays by split and name, and JSON-serialisable metadata."""


def fingerprint(paths: Iterable[Path]) -> list[list[Any]]:
    """Return name, size and modification time of each file, including all files in folders."""
    entries = []
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            stat = file.stat()
            entries.append([str(file.relative_to(path.parent)), stat.st_size, stat.st_mtime_ns])
    return entries


def cache_key(value: Any) -> str:
    """Return a short hash of a JSON-serialisable value."""
    text = json.dumps([FORMAT, value], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds prepared arrays."""
    return (folder / METADATA).exists()


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """Yield a draft that becomes the folder when the block ends, unless a complete one exists; removed on failure."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft, lock = _new_draft(folder)
    except OSError as error:
        reason = f"{folder.parent} is not writable: {error.strerror}"
        raise DataError(f"cannot store prepared data: {reason}; give another cache_dir") from error
    try:
        yield draft
        draft.chmod(0o755)
        for path in (*draft.iterdir(), draft):  # before the rename, or a crash of the machine may keep only that
            _sync(path)
        try:
            os.rename(draft, folder)
        except OSError:
            if not is_complete(folder):
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _new_draft(folder: Path) -> tuple[Path, int | None]:
    """Return a new draft with its lock; remove the drafts of processes that were killed, whose locks are free."""
    for path in folder.parent.iterdir():
        if DRAFT.fullmatch(path.name) and (lock := _lock(path, wait=False)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    while True:
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        lock = _lock(draft, wait=True)
        if draft.exists():  # another process may have removed it before it was locked
            return draft, lock


def _lock(folder: Path, wait: bool) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if that is not possible."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _sync(path: Path) -> None:
    """Write a file or folder to the disk; not every file system can for a folder."""
    with suppress(OSError) if path.is_dir() else nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def build_once(folder: Path, build: Callable[[], Built]) -> Path:
    """Return the folder; if it does not exist, build its arrays and create it atomically."""
    if is_complete(folder):
        return folder
    with drafted(folder) as draft:
        splits, metadata = build()
        for split, arrays in splits.items():
            for name, array in arrays.items():
                np.save(draft / f"{split}.{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
        (draft / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    return folder


def load_arrays(folder: Path) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Return the memory-mapped arrays of a folder by split and name, and its metadata."""
    advice = f"remove {folder}, and the data is prepared again"
    splits: dict[str, Arrays] = {}
    for path in sorted(folder.glob("*.npy")):
        with reading(path, DAMAGED_CACHE, advice):
            split, name, _ = path.name.split(".")
            splits.setdefault(split, {})[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    with reading(folder / METADATA, DAMAGED_CACHE, advice):
        metadata: dict[str, Any] = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    return splits, metadata


def check_split(
    where: str, split: str, arrays: Arrays, facts: Mapping[str, Any], error: type[Exception] = DataError
) -> None:
    """Raise an error if a split is empty, its arrays differ in length, or a label is out of range."""
    y = arrays["y"]
    if len(y) == 0:
        raise error(f"{where}: the {split} split has no example")
    for x, offsets in ((arrays["x"], arrays.get("offsets")), (arrays.get("x2"), arrays.get("offsets2"))):
        examples = len(bounds(offsets)[0]) if offsets is not None else len(y if x is None else x)
        if examples != len(y):
            raise error(f"{where}: the {split} split has {examples} examples and {len(y)} labels")
        if offsets is not None and (x is None or not _are_boundaries(offsets, len(x))):
            raise error(f"{where}: the offsets of {split} are not the boundaries of its sequences")
    classes = len(facts["classes"]) if facts.get("target", "class") == "class" else 0
    if classes and (y.min() < 0 or y.max() >= classes):
        i = int(np.flatnonzero((y < 0) | (y >= classes))[0])
        raise error(f"{where}: example {i} of {split} has label {y[i]}; expected 0 .. {classes - 1}")


def bounds(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and stop of every sequence for `Split.offsets`."""
    return (offsets[:-1], offsets[1:]) if offsets.ndim == 1 else (offsets[:, 0], offsets[:, 1])


def _are_boundaries(offsets: np.ndarray, length: int) -> bool:
    starts, stops = bounds(offsets)
    whole = offsets.ndim == 2 or (offsets[0] == 0 and offsets[-1] == length)
    return bool(whole and starts.min() >= 0 and stops.max() <= length and (starts <= stops).all())
