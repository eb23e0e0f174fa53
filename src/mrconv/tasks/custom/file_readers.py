"""Readers of custom data: arrays, tables, texts, recordings and images become examples with class names."""

from __future__ import annotations

import csv
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..archives import read_members
from ..audio_files import read_audio
from ..errors import DataError
from ..image_files import decode_image, fit_image
from ..text_lines import read_json_lines, read_lines

TABLES = (".npz", ".csv", ".tsv", ".jsonl", ".jsonl.xz")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
MEDIA = dict.fromkeys((".wav", ".flac", ".ogg", ".mp3"), "audio") | dict.fromkeys((".png", ".jpg", ".jpeg"), "image")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Examples:
    """Examples of one file or folder.

    Args:
        kind: kind of the examples.
        x: by kind: "text" strings, "tokens" integers (n, length), "values" (n, length, channels), "audio" arrays
            (samples,), "image" arrays (height, width, channels) with 1 or 3 channels.
        labels: class names; "" where a label is missing.
        where: the file or folder, for errors.
        names: names of the examples, for errors; by default their numbers.
        changes: what was changed to read them, with the number of examples.
    """

    kind: str
    x: Sequence[Any] | np.ndarray
    labels: Sequence[str]
    where: str
    names: Sequence[str] = ()
    changes: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Examples:
        """Return the examples at these indices."""
        x = self.x[indices] if isinstance(self.x, np.ndarray) else [self.x[i] for i in indices]
        return Examples(
            self.kind, x, [self.labels[i] for i in indices], self.where, [self.example_name(i) for i in indices]
        )

    def example_name(self, i: int) -> str:
        """Return the name of example i."""
        return self.names[i] if self.names else f"example {i + 1}"

    def describe(self, i: int) -> str:
        """Return file and name of example i, for an error."""
        return f"{self.where}, {self.example_name(i)}"


@dataclass(frozen=True)
class Columns:
    """Columns of a table: their names, and whether the labels and the texts must be there."""

    label: str
    text: str
    label_required: bool = True
    text_required: bool = False


def suffix(path: Path | PurePosixPath) -> str:
    """Return the known suffix of a file name in lower case, such as .csv or .jsonl.xz."""
    name = path.name.lower()
    return next((end for end in (*TABLES, *ARCHIVES, *MEDIA) if name.endswith(end)), path.suffix)


def read_npz(path: Path, labelled: bool = True) -> dict[str, Examples]:
    """Return the arrays x and y as "all", or x_train and y_train, and likewise val and test, by split.

    Without `labelled`, the arrays of labels may be missing.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a file of numeric arrays saved by numpy.savez: {error}") from error
    names = {split: f"_{split}" for split in SPLITS if f"x_{split}" in arrays or f"y_{split}" in arrays} or {"all": ""}
    return {split: _npz_examples(path, arrays, f"x{end}", f"y{end}", labelled) for split, end in names.items()}


def _npz_examples(path: Path, arrays: dict[str, np.ndarray], x_name: str, y_name: str, labelled: bool) -> Examples:
    needed = (x_name, y_name) if labelled else (x_name,)
    if not set(needed) <= set(arrays):
        raise DataError(f"{path} has {', '.join(arrays) or 'no array'}; expected {' and '.join(needed)}")
    x, where = arrays[x_name], f"{path}, {x_name}"
    if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or 0 in x.shape:
        raise DataError(
            f"{where} is {x.dtype} of shape {x.shape}; expected integers or floats (n, length) or (n, length, channels)"
        )
    labels = _npz_labels(path, x, arrays[y_name], x_name, y_name) if y_name in arrays else [""] * len(x)
    if x.dtype.kind != "f" and x.ndim == 2:
        return Examples("tokens", x, labels, where)
    return Examples("values", x[..., None] if x.ndim == 2 else x, labels, where)


def _npz_labels(path: Path, x: np.ndarray, y: np.ndarray, x_name: str, y_name: str) -> list[str]:
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != x.shape[:1]:
        raise DataError(
            f"{path}: {x_name} has {len(x)} examples and {y_name} has shape {y.shape}; expected ({len(x)},)"
        )
    if y.dtype.kind not in "iuUb" and not (y.dtype.kind == "f" and np.array_equal(y, np.round(y))):
        raise DataError(f"{path}: {y_name} is {y.dtype}; expected integers or names of classes")
    return [str(label) for label in (y.astype(np.int64) if y.dtype.kind in "fb" else y).tolist()]


def read_table(path: Path, columns: Columns) -> Examples:
    """Return the examples of a CSV or TSV file: texts if it has a text column, else numbers from all other columns."""
    csv.field_size_limit(2**31 - 1)
    lines = (f"{line}\n" for _, line in read_lines(path))
    reader = csv.reader(lines, delimiter="\t" if suffix(path) == ".tsv" else ",", strict=True)
    x: list[Any] = []
    labels: list[str] = []
    try:
        header = next(reader, [])
        label, text = _find_columns(path, header, columns)
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(f"{where}: {len(fields)} columns; expected {len(header)}")
            labels.append("" if label is None else _parse_label(fields[label], where, columns))
            if text is not None:
                x.append(fields[text])
            else:
                numbers = [i for i in range(len(header)) if i != label]
                x.append(_parse_numbers([fields[i] for i in numbers], [header[i] for i in numbers], where))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    if text is not None or not x:
        return Examples("text", x, labels, str(path))
    return Examples("values", np.stack(x)[..., None], labels, str(path))


def _find_columns(path: Path, header: list[str], columns: Columns) -> tuple[int | None, int | None]:
    """Return the positions of the columns of labels and texts; raise DataError if one is required and missing."""
    found = ", ".join(header) or "none"
    if columns.text_required and columns.text not in header:
        raise DataError(f"{path} has columns {found}; expected {columns.text}, the column of texts of the training")
    if columns.label_required and (columns.label not in header or len(header) < 2):
        others = [name for name in header if name not in (columns.label, columns.text)]
        hint = f". To name the column of labels, set task.label_column={others[-1]}" if others else ""
        raise DataError(f"{path} has columns {found}; expected {columns.label} and others{hint}")
    positions = [header.index(name) if name in header else None for name in (columns.label, columns.text)]
    return positions[0], positions[1]


def _parse_numbers(fields: list[str], names: list[str], where: str) -> np.ndarray:
    try:
        return np.array([float(field) for field in fields], np.float32)
    except ValueError:
        for field, name in zip(fields, names, strict=True):
            try:
                float(field)
            except ValueError:
                raise DataError(
                    f"{where}: {name} is {field!r:.60}; expected a number in every column, as no column is named text; "
                    f"for texts, set task.text_column, for example task.text_column={name}"
                ) from None
        raise


def _parse_label(label: Any, where: str, columns: Columns) -> str:
    if not columns.label_required and label in ("", None):
        return ""
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        raise DataError(f"{where}: {columns.label} is {label!r:.60}; expected a name or an integer")
    return str(label).strip()


def read_jsonl(path: Path, columns: Columns) -> Examples:
    """Return the examples of a file with one JSON object of text and label per line."""
    x, labels = [], []
    optional = () if columns.label_required else (columns.label,)
    hint = "; for other names, set task.label_column and task.text_column" if columns.label_required else ""
    for number, (text, label) in read_json_lines(path, columns.text, columns.label, optional=optional, hint=hint):
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: {columns.text} is {text!r:.60}; expected a string")
        x.append(text)
        labels.append(_parse_label(label, f"{path}, line {number}", columns))
    return Examples("text", x, labels, str(path))


def class_folders(path: Path, exclude: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones and the excluded one."""
    return sorted(
        p for p in path.iterdir() if p.is_dir() and p.name[0] not in "._" and p.resolve() != exclude.resolve()
    )


def read_media(path: Path, sample_rate: int, grey: bool, size: int, on_file: Callable[[], None]) -> Examples:
    """Return the recordings or images of a folder or archive; the first folder of a file's path is its class.

    Images are resized to size x size pixels; 0 keeps their sizes.
    """
    x: list[np.ndarray] = []
    names: list[str] = []
    changes = Counter[str]()
    kind = ""
    for name, content in read_members(path, _is_media):
        file_kind = MEDIA[suffix(PurePosixPath(name))]
        if kind not in ("", file_kind):
            raise DataError(f"{path} has {kind} files, and {name}; expected files of one kind")
        kind = file_kind
        where = f"{path}: {name}"
        if kind == "audio":
            item, notes = read_audio(content, where, sample_rate)
        else:
            item = decode_image(content, where, grey)
            item, notes = fit_image(item, size, size) if size else (item, [])
        x.append(item)
        names.append(name)
        changes.update(notes)
        on_file()
    if not x:
        raise DataError(f"{path} has no {', '.join(MEDIA)} file, and is not a table ({', '.join(TABLES)})")
    return Examples(kind, x, _labels_from_paths(path, names), str(path), names, changes)


def _labels_from_paths(path: Path, names: Sequence[str]) -> list[str]:
    parts = [name.split("/") for name in names]
    if path.is_file() and all(len(each) > 2 and each[0] == parts[0][0] for each in parts):
        parts = [each[1:] for each in parts]  # the archive of a folder has that folder as its only entry
    for each in parts:
        if len(each) < 2:
            raise DataError(f"{path}: {each[0]} is not in a folder; expected CLASS/{each[0]}")
    return [each[0] for each in parts]


def _is_media(name: str) -> bool:
    return suffix(PurePosixPath(name)) in MEDIA and visible(name)


def visible(name: str) -> bool:
    """Return whether neither a file nor its folders are hidden or macOS's metadata (__MACOSX, or named ._)."""
    return not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)
