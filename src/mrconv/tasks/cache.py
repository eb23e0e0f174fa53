"""A cache of prepared data: folders of memory-mapped arrays, written atomically.

The name of a folder contains a hash of everything that determines its arrays: the task, its options and its source
files. A folder is written under a temporary name and renamed when it is complete. An interrupted process therefore
leaves no folder that looks complete, and the first of two concurrent writers wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError

FORMAT = 1
METADATA = "meta.json"
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
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        reason = f"{folder.parent} is not writable: {error.strerror}"
        raise DataError(f"cannot store prepared data: {reason}; give another cache_dir") from error
    try:
        yield draft
        draft.chmod(0o755)
        try:
            os.rename(draft, folder)
        except OSError:
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
    splits: dict[str, Arrays] = {}
    for path in sorted(folder.glob("*.npy")):
        split, name, _ = path.name.split(".")
        splits.setdefault(split, {})[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    return splits, json.loads((folder / METADATA).read_text(encoding="utf-8"))
