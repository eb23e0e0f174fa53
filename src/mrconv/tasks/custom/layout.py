"""The layout of custom data: which file or folder holds which split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError, MissingData
from .file_readers import ARCHIVES, TABLES, class_folders, is_media, suffix
from .label_tables import LABEL_FILES

SPLIT_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def holds_media(path: Path) -> bool:
    """Return whether a path is a folder or archive, which hold recordings or images."""
    return path.is_dir() or suffix(path) in ARCHIVES


def split_paths(path: str, cache_root: Path) -> dict[str, Path]:
    """Return the file or folder of each split, or of "all"."""
    if not path:
        raise MissingData("folder: set path, or data with `mrconv train`, to a file or folder with your data")
    root = Path(path).expanduser()
    if not root.exists():
        raise MissingData(f"path {path} does not exist: looked for {root.absolute()}")
    if root.is_file():
        return {"all": root}
    entries = sorted(p for p in root.iterdir() if p.is_dir() or suffix(p) in (*TABLES, *ARCHIVES))
    if any(suffix(p) in ARCHIVES for p in entries) or any(is_media(p.name) for p in root.rglob("*")):
        entries = [p for p in entries if p.name not in LABEL_FILES]
    paths = _named_after_splits(entries)
    if paths and "train" not in paths:
        raise DataError(f"{root} has {', '.join(p.name for p in paths.values())}; expected train too")
    if paths:
        return paths if len(paths) > 1 else {"all": paths["train"]}
    files = [p for p in entries if p.is_file()]
    if class_folders(root, cache_root) or not files:
        return {"all": root}
    if len(files) > 1:
        names = ", ".join(p.name for p in files)
        raise DataError(f"{root} has {names}: set path to one of them or name them train, test")
    return {"all": files[0]}


def _named_after_splits(entries: Sequence[Path]) -> dict[str, Path]:
    """Return the files and folders that are named after a split."""
    paths: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        named = [p for p in entries if (p.name if p.is_dir() else p.name.removesuffix(suffix(p))) in names]
        if len(named) > 1:
            raise DataError(f"{named[0]} and {named[1].name} both exist: which one is {split}?")
        if named:
            paths[split] = named[0]
    return paths
