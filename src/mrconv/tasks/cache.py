"""Prepared data as memory-mapped arrays in a folder: all of it is there, or the folder is not.

A folder's name holds a hash of everything the arrays follow from: the task, its options and its source files. It is
written under another name and renamed when complete, so that whoever is killed leaves nothing that looks finished, and
of two at once the first to finish wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError

FORMAT = 1
META = "meta.json"
Arrays = dict[str, np.ndarray]
Built = tuple[Mapping[str, Arrays], dict[str, Any]]
"""Arrays by split and name, and what is to be known about them, as JSON."""


def fingerprint(paths: Iterable[Path]) -> list[list[Any]]:
    """Return name, size and time of change of each file, those in folders included."""
    found = []
    for path in paths:
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for each in inside:
            stat = each.stat()
            found.append([str(each.relative_to(path.parent)), stat.st_size, stat.st_mtime_ns])
    return found


def key(parts: Any) -> str:
    """Return a short hash of anything that JSON can hold."""
    text = json.dumps([FORMAT, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cached(folder: Path, build: Callable[[], Built]) -> Path:
    """Return the folder; if it is not there, build what belongs in it and put it there all at once."""
    if (folder / META).exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        why = f"{folder.parent} cannot be written to: {error.strerror}"
        raise DataError(f"prepared data has no place: {why}; give another cache_dir") from error
    try:
        splits, meta = build()
        for split, arrays in splits.items():
            for name, array in arrays.items():
                np.save(draft / f"{split}.{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
        (draft / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        draft.chmod(0o755)
        try:
            os.rename(draft, folder)
        except OSError:
            if not (folder / META).exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load(folder: Path) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Return what a folder holds, the arrays memory-mapped."""
    splits: dict[str, Arrays] = {}
    for path in sorted(folder.glob("*.npy")):
        split, name, _ = path.name.split(".")
        splits.setdefault(split, {})[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    return splits, json.loads((folder / META).read_text(encoding="utf-8"))
