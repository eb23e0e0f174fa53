"""A user's own files, as rows and the names of their classes: arrays, tables, texts, recordings and pictures."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..archives import members
from ..audio_files import read_audio
from ..errors import DataError
from ..image_files import decode_image
from ..text_lines import json_rows, lines

TABLES = (".npz", ".csv", ".tsv", ".jsonl", ".jsonl.xz")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
MEDIA = {".wav": "audio", ".flac": "audio", ".png": "image", ".jpg": "image", ".jpeg": "image"}
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Rows:
    """Rows of one file or folder.

    `x` by kind: "text" strings, "tokens" (n, length) integers, "values" (n, length, channels), "audio" (samples,) each,
    "image" (height, width, channels) each, with 1 or 3 channels.
    """

    kind: str
    x: Sequence[Any] | np.ndarray
    labels: Sequence[str]
    where: str
    names: Sequence[str] = ()

    def taken(self, rows: np.ndarray) -> Rows:
        """Return some of the rows."""
        x = self.x[rows] if isinstance(self.x, np.ndarray) else [self.x[i] for i in rows]
        names = [self.names[i] if self.names else f"row {i + 1}" for i in rows]
        return Rows(self.kind, x, [self.labels[i] for i in rows], self.where, names)

    def at(self, i: int) -> str:
        """Return where row i is from, for an error."""
        return f"{self.where}, {self.names[i] if self.names else f'row {i + 1}'}"


def suffix(path: Path | PurePosixPath) -> str:
    """Return the end of a name that says what is in the file, in lower case: .csv, .jsonl.xz."""
    name = path.name.lower()
    return next((end for end in (*TABLES, *ARCHIVES, *MEDIA) if name.endswith(end)), path.suffix)


def read_npz(path: Path) -> dict[str, Rows]:
    """Return x and y, as "all", or x_train and y_train and the same for val and test."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} does not read as arrays of numbers saved by numpy.savez: {error}") from error
    names = {split: f"_{split}" for split in SPLITS if f"x_{split}" in arrays or f"y_{split}" in arrays} or {"all": ""}
    return {split: _npz_rows(path, arrays, f"x{end}", f"y{end}") for split, end in names.items()}


def _npz_rows(path: Path, arrays: dict[str, np.ndarray], x_name: str, y_name: str) -> Rows:
    if x_name not in arrays or y_name not in arrays:
        raise DataError(f"{path} has {', '.join(arrays) or 'no array'}; expected {x_name} and {y_name}")
    x, y, where = arrays[x_name], arrays[y_name], f"{path}, {x_name}"
    if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or 0 in x.shape:
        raise DataError(
            f"{where} is {x.dtype} of shape {x.shape}; expected integers or floats (n, length) or (n, length, channels)"
        )
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != x.shape[:1]:
        raise DataError(f"{path}: {x_name} has {len(x)} rows and {y_name} is of shape {y.shape}; expected ({len(x)},)")
    if y.dtype.kind not in "iuUb" and not (y.dtype.kind == "f" and np.array_equal(y, np.round(y))):
        raise DataError(f"{path}: {y_name} is {y.dtype}; expected whole numbers or names of classes")
    labels = [str(label) for label in (y.astype(np.int64) if y.dtype.kind in "fb" else y).tolist()]
    if x.dtype.kind != "f" and x.ndim == 2:
        return Rows("tokens", x, labels, where)
    return Rows("values", x[..., None] if x.ndim == 2 else x, labels, where)


def read_table(path: Path, label_column: str, text_column: str) -> Rows:
    """Return the rows of a CSV or TSV file: texts if there is a column of them, else numbers in all other columns."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(
        (f"{line}\n" for _, line in lines(path)), delimiter="\t" if suffix(path) == ".tsv" else ",", strict=True
    )
    x: list[Any] = []
    labels: list[str] = []
    try:
        header = next(reader, [])
        if label_column not in header or len(header) < 2:
            raise DataError(f"{path} has columns {', '.join(header) or 'none'}; expected {label_column} and others")
        label = header.index(label_column)
        text = header.index(text_column) if text_column in header else None
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(f"{where}: {len(row)} columns; expected {len(header)}")
            labels.append(_label(row.pop(label) if text is None else row[label], where))
            x.append(_numbers(row, header[:label] + header[label + 1 :], where) if text is None else row[text])
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    if text is not None or not x:
        return Rows("text", x, labels, str(path))
    return Rows("values", np.stack(x)[..., None], labels, str(path))


def _numbers(fields: list[str], names: list[str], where: str) -> np.ndarray:
    try:
        return np.array([float(field) for field in fields], np.float32)
    except ValueError:
        for field, name in zip(fields, names, strict=True):
            try:
                float(field)
            except ValueError:
                raise DataError(
                    f"{where}: {name} is {field!r:.60}; without a column of texts (option text_column), all are numbers"
                ) from None
        raise


def _label(label: Any, where: str) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        raise DataError(f"{where}: label is {label!r:.60}; expected a name or a whole number")
    return str(label).strip()


def read_jsonl(path: Path, label_column: str, text_column: str) -> Rows:
    """Return the rows of a file with an object of text and label in each line."""
    x, labels = [], []
    for number, (text, label) in json_rows(path, text_column, label_column):
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: {text_column} is {text!r:.60}; expected a string")
        x.append(text)
        labels.append(_label(label, f"{path}, line {number}"))
    return Rows("text", x, labels, str(path))


def class_folders(path: Path, without: Path) -> list[Path]:
    """Return the folders in a folder, hidden ones and this one left out."""
    return sorted(
        p for p in path.iterdir() if p.is_dir() and p.name[0] not in "._" and p.resolve() != without.resolve()
    )


def read_media(path: Path, rate: int, grey: bool, report: Callable[[], None]) -> Rows:
    """Return the recordings or pictures of a folder or archive; the first folder of a file's path names its class."""
    x: list[np.ndarray] = []
    names: list[str] = []
    kind = ""
    for name, content in members(path, _is_media):
        here = MEDIA[suffix(PurePosixPath(name))]
        if kind not in ("", here):
            raise DataError(f"{path} has {kind} files, and {name}: expected one kind")
        kind = here
        where = f"{path}: {name}"
        x.append(read_audio(content, where, rate) if kind == "audio" else decode_image(content, where, grey))
        names.append(name)
        if kind == "image" and x[0].shape[:2] != x[-1].shape[:2]:
            sizes = ["{1} x {0}".format(*each.shape) for each in (x[-1], x[0])]
            raise DataError(f"{where} is {sizes[0]} pixels, and {names[0]} {sizes[1]}: expected one size")
        report()
    if not x:
        raise DataError(f"{path} has no {', '.join(MEDIA)} file, and is no table ({', '.join(TABLES)})")
    places = [name.split("/") for name in names]
    if path.is_file() and all(len(place) > 2 and place[0] == places[0][0] for place in places):
        places = [place[1:] for place in places]  # the archive of a folder, with that folder in it
    for place in places:
        if len(place) < 2:
            raise DataError(f"{path}: {place[0]} is in no folder; expected CLASS/{place[0]}")
    return Rows(kind, x, [place[0] for place in places], str(path), names)


def _is_media(name: str) -> bool:
    path = PurePosixPath(name)  # on a Mac, archives get a twin of every file in __MACOSX, or named ._
    return suffix(path) in MEDIA and not any(part.startswith((".", "__MACOSX")) for part in path.parts)
