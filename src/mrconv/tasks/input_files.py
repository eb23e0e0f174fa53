"""Inputs of a model from files: everything that training takes, with or without labels, and single files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from .archives import read_members
from .custom.file_readers import (
    ARCHIVES,
    MEDIA,
    TABLES,
    Columns,
    Examples,
    read_jsonl,
    read_npz,
    read_table,
    suffix,
    visible,
)
from .custom.label_tables import find_table, read_labels
from .custom.labels import FORMATS
from .errors import DataError
from .preprocessing import Preprocessor


class Input(NamedTuple):
    """One raw input: its name for messages, what `RawInputs.preprocess` takes, and its label if it is known."""

    name: str
    raw: Any
    label: str | None = None


def holds_several(path: Path) -> bool:
    """Return whether a path is a folder, a table or an archive, which hold any number of inputs."""
    return path.is_dir() or suffix(path) in (*TABLES, *ARCHIVES)


def read_inputs(path: Path, preprocessor: Preprocessor) -> Iterator[Input]:
    """Yield the inputs of a file or folder.

    - a table (`.csv`, `.tsv`, `.jsonl`, `.jsonl.xz`, `.npz`) as `task=folder` takes it; labels may be missing;
    - a folder or archive of recordings, images or texts (`.txt`), in subfolders or not; labels come from a table
      (labels.csv, labels.tsv, labels.jsonl) in it, or else from folders named after a class;
    - a folder of tables, for example train.csv and test.csv;
    - any other file: one input.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not holds_several(path):
        yield Input(str(path), path)
    elif suffix(path) in TABLES and not path.is_dir():
        yield from _from_table(path, preprocessor)
    else:
        yield from _from_folder(path, preprocessor)


def _from_folder(path: Path, preprocessor: Preprocessor) -> Iterator[Input]:
    """Yield the files of the model's kind in a folder or archive; if it has none, the inputs of the folder's tables."""
    suffixes = [end for end, kind in MEDIA.items() if kind == preprocessor.kind]
    if preprocessor.vocabulary:
        suffixes = [".txt"]
    found = False
    source = None if preprocessor.vocabulary else find_table(path)
    known = None if source is None else read_labels(source, _columns(preprocessor))
    for name, raw in _files(path, suffixes):
        found = True
        label = _label(name, preprocessor) if known is None else _text(known.label(name), preprocessor)
        yield Input(f"{path / name}" if path.is_dir() else f"{path}: {name}", raw, label)
    if found:
        return
    tables = sorted(p for p in path.iterdir() if p.is_file() and suffix(p) in TABLES) if path.is_dir() else []
    if not tables:
        expected = ", ".join((*suffixes, *TABLES) if path.is_dir() else suffixes) or "(the model takes numbers)"
        raise DataError(f"{path} has no file of the kind that the model takes, {preprocessor.kind}: {expected}")
    for table in tables:
        yield from _from_table(table, preprocessor)


def _files(path: Path, suffixes: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and raw input, a path or bytes, of the files with one of these suffixes."""
    if not path.is_dir():
        yield from read_members(path, lambda name: PurePosixPath(name).suffix.lower() in suffixes and visible(name))
        return
    for file in sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file()):
        name = file.relative_to(path).as_posix()
        if visible(name):
            yield name, file


def _label(name: str, preprocessor: Preprocessor) -> str | None:
    """Return the class among the folders of a file, the innermost first."""
    classes = preprocessor.classes if preprocessor.target == "class" else ()
    return next((part for part in reversed(PurePosixPath(name).parts[:-1]) if part in classes), None)


def _text(label: Any, preprocessor: Preprocessor) -> str | None:
    """Return a label as text, in the form of a prediction."""
    if label is not None and preprocessor.target == "labels":
        order = {name: i for i, name in enumerate(preprocessor.classes)}
        label = sorted(label, key=lambda name: order.get(name, len(order)))
    return None if label is None else FORMATS[preprocessor.target].text(label)


def _columns(preprocessor: Preprocessor) -> Columns:
    p = preprocessor
    return Columns(p.label_column, p.text_column, False, bool(p.vocabulary), p.target, p.group_column)


def _from_table(path: Path, preprocessor: Preprocessor) -> Iterator[Input]:
    p = preprocessor
    columns = _columns(p)
    parts: Mapping[str, Examples]
    if suffix(path) == ".npz":
        parts = read_npz(path, labelled=False, target=p.target)
    elif suffix(path) in (".csv", ".tsv"):
        parts = {"all": read_table(path, columns)}
    else:
        parts = {"all": read_jsonl(path, columns)}
    for examples in parts.values():
        for i, raw in enumerate(examples.x):
            yield Input(examples.describe(i), raw, _text(examples.labels[i], p))
