"""Readers of custom data: arrays, tables, texts, recordings and images become examples with labels."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

from ..archives import read_members
from ..audio_files import read_audio
from ..errors import DataError
from ..image_files import decode_image, fit_image
from ..npy_files import array_names, read_arrays
from ..reading import Expansion
from ..text_lines import ArchivedFile, TextFile, read_json_lines, read_lines
from .labels import FORMATS, labels_of_array, parse_label

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
            (samples,), "image" arrays (height, width, channels) with 1 or 3 channels. Tokens and values of different
            lengths are a list.
        labels: labels as `labels.FORMATS` has them for the target; None where a label is missing.
        where: the file or folder, for errors.
        names: names of the examples, for errors; by default their numbers.
        changes: what was changed to read them, with the number of examples.
        outputs: names of the outputs that the file sets: values, and the columns of 0 and 1.
        groups: groups of the examples that a table or array names.
    """

    kind: str
    x: Sequence[Any] | np.ndarray
    labels: Sequence[Any]
    where: str
    names: Sequence[str] = ()
    changes: Counter[str] = field(default_factory=Counter)
    outputs: tuple[str, ...] = ()
    groups: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Examples:
        """Return the examples at these indices."""
        x = self.x[indices] if isinstance(self.x, np.ndarray) else [self.x[i] for i in indices]
        names = [self.example_name(i) for i in indices]
        groups = [self.groups[i] for i in indices] if self.groups else ()
        return replace(self, x=x, labels=[self.labels[i] for i in indices], names=names, groups=groups)

    def example_name(self, i: int) -> str:
        """Return the name of example i."""
        return self.names[i] if self.names else f"example {i + 1}"

    def describe(self, i: int) -> str:
        """Return file and name of example i, for an error."""
        return f"{self.where}, {self.example_name(i)}"


@dataclass(frozen=True)
class Columns:
    """Columns of a table: their names, whether the labels and the texts must be there, and the target of the labels.

    For target "values", `label` may name several columns, separated by commas. The column `group` is no part of x.
    `content` is what the column `text` holds, for errors.
    """

    label: str
    text: str
    label_required: bool = True
    text_required: bool = False
    target: str = "class"
    group: str = ""
    group_required: bool = True
    content: str = "texts of the training"

    @property
    def labels(self) -> list[str]:
        """The names of the columns of labels."""
        return FORMATS[self.target].columns(self.label)

    def parse(self, values: list[Any], where: str) -> Any:
        """Return the label in the values of these columns."""
        value = values[0] if len(values) == 1 else values
        return parse_label(self.target, value, where, " and ".join(self.labels), self.label_required)

    def examples(
        self,
        kind: str,
        x: Sequence[Any] | np.ndarray,
        labels: Sequence[Any],
        path: TextFile,
        groups: Sequence[str] = (),
    ) -> Examples:
        """Return the examples of a table."""
        first = next((label for label in labels if label is not None), None)
        outputs = FORMATS[self.target].names_of_outputs(first, self.labels)
        return Examples(kind, x, labels, str(path), outputs=outputs, groups=groups)


def suffix(path: PurePath | ArchivedFile) -> str:
    """Return the known suffix of a file name in lower case, such as .csv or .jsonl.xz."""
    name = path.name.lower()
    return next((end for end in (*TABLES, *ARCHIVES, *MEDIA) if name.endswith(end)), path.suffix)


def read_npz(path: Path, labelled: bool = True, target: str = "class", group: str = "") -> dict[str, Examples]:
    """Return the arrays x and y as "all", or x_train and y_train, and likewise val and test, by split.

    y holds, by target, classes (n,), 0 and 1 (n, labels), values (n,) or (n, values), or classes of positions (n,
    length), where negative integers stand for no label. Without `labelled`, it may be missing. `group` names an array
    (n,) of the groups of "all".

    `lengths` (n,), or lengths_train and so on, are the lengths of padded examples, which are cut to them.
    """
    found = array_names(path)
    names = {split: f"_{split}" for split in SPLITS if f"x_{split}" in found or f"y_{split}" in found} or {"all": ""}
    for end in names.values():
        needed = [f"x{end}", f"y{end}"] if labelled else [f"x{end}"]
        if not set(needed) <= set(found):
            given = f"{', '.join(found) or 'no array':.200}"
            raise DataError(f"{path} has {given}; expected {' and '.join(needed)}")
    arrays = read_arrays(path, {f"{name}{end}" for name in ("x", "y", "lengths") for end in names.values()} | {group})
    parts = {split: _npz_examples(path, arrays, f"x{end}", f"y{end}", target) for split, end in names.items()}
    if group and "all" in parts:
        n = len(parts["all"])
        if group not in arrays or arrays[group].shape != (n,):
            got = f"{group} of shape {arrays[group].shape}" if group in arrays else ", ".join(found)
            raise DataError(f"{path} has {got}; expected {group}, the groups, of shape ({n},)")
        parts["all"] = replace(parts["all"], groups=arrays[group].astype(str).tolist())
    return parts


def _npz_examples(path: Path, arrays: dict[str, np.ndarray], x_name: str, y_name: str, target: str) -> Examples:
    x, where = arrays[x_name], f"{path}, {x_name}"
    if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or 0 in x.shape:
        raise DataError(
            f"{where} is {x.dtype} of shape {x.shape}; expected integers or floats (n, length) or (n, length, channels)"
        )
    labels, outputs = [None] * len(x), tuple[str, ...]()
    if y_name in arrays:
        labels = labels_of_array(target, y := arrays[y_name], x, f"{path}, {y_name}")
        columns = [str(i) for i in range(y.shape[1])] if target == "labels" else ["y"]
        outputs = tuple(columns) if target == "labels" else FORMATS[target].names_of_outputs(labels[0], columns)
    tokens = x.dtype.kind != "f" and x.ndim == 2
    x = x[..., None] if x.ndim == 2 and not tokens else x
    examples = Examples("tokens" if tokens else "values", x, labels, where, outputs=outputs)
    lengths = arrays.get(x_name.replace("x", "lengths", 1))
    return examples if lengths is None else _cut_padding(examples, lengths, target)


def _cut_padding(examples: Examples, lengths: np.ndarray, target: str) -> Examples:
    """Return arrays, and labels of positions, without what is after the lengths."""
    x, labels = np.asarray(examples.x), examples.labels
    fits = lengths.shape == (len(x),) and lengths.dtype.kind in "iu" and lengths.min() > 0
    if not fits or lengths.max() > x.shape[1]:
        raise DataError(
            f"{examples.where}: lengths are {lengths.dtype} of shape {lengths.shape}; expected {len(x)} integers in "
            f"1 .. {x.shape[1]}"
        )
    if target == "positions":
        labels = [label and label[:n] for label, n in zip(labels, lengths, strict=True)]
    return replace(examples, x=[each[:n] for each, n in zip(x, lengths, strict=True)], labels=labels)


def read_table(path: TextFile, columns: Columns) -> Examples:
    """Return the examples of a CSV or TSV file: texts if it has a text column, else numbers from all other columns.

    `labels.FORMATS` describes the cells of labels by target.
    """
    csv.field_size_limit(2**31 - 1)
    lines = (f"{line}\n" for _, line in read_lines(path))
    reader = csv.reader(lines, delimiter="\t" if suffix(path) == ".tsv" else ",", strict=True)
    x: list[Any] = []
    labels: list[Any] = []
    groups: list[str] = []
    try:
        header = next(reader, [])
        given, text = _find_columns(path, header, columns)
        group = header.index(columns.group) if columns.group in header else None
        numbers = [i for i in range(len(header)) if i not in (*given, group)]
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(f"{where}: {len(fields)} columns; expected {len(header)}")
            labels.append(columns.parse([fields[i] for i in given], where) if given else None)
            if group is not None:
                groups.append(fields[group])
            if text is not None:
                x.append(fields[text])
            else:
                x.append(_parse_numbers([fields[i] for i in numbers], [header[i] for i in numbers], where))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    if text is not None or not x:
        return columns.examples("text", x, labels, path, groups)
    return columns.examples("values", np.stack(x)[..., None], labels, path, groups)


def _find_columns(path: TextFile, header: list[str], columns: Columns) -> tuple[list[int], int | None]:
    """Return the positions of the columns of labels and texts; raise DataError if one is required and missing."""
    found = ", ".join(header) or "none"
    if columns.text_required and columns.text not in header:
        raise DataError(f"{path} has columns {found}; expected {columns.text}, the column of {columns.content}")
    missing = not set(columns.labels) <= set(header) or len(header) <= len(columns.labels)
    if columns.label_required and missing:
        others = [name for name in header if name not in (*columns.labels, columns.text)]
        hint = f". To name the column of labels, set task.label_column={others[-1]}" if others else ""
        raise DataError(f"{path} has columns {found}; expected {', '.join(columns.labels)} and others{hint}")
    if columns.label_required and columns.group_required and columns.group and columns.group not in header:
        raise DataError(f"{path} has columns {found}; expected {columns.group}, the column of task.group")
    labels = [header.index(name) for name in columns.labels if name in header]
    return labels, header.index(columns.text) if columns.text in header else None


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


def read_jsonl(path: TextFile, columns: Columns) -> Examples:
    """Return the examples of a file with one JSON object of text and label per line.

    A label may be a list: of names for target "labels", of numbers for "values", of classes for "positions".
    """
    x: list[str] = []
    labels: list[Any] = []
    groups: list[str] = []
    optional = set() if columns.label_required else set(columns.labels)
    optional |= set() if columns.group_required else {columns.group}
    hint = "; for other names, set task.label_column and task.text_column" if columns.label_required else ""
    names = [columns.text, *columns.labels]
    grouped = bool(columns.group) and columns.label_required
    for number, (text, *label) in read_json_lines(
        path, *names, *([columns.group] if grouped else ()), optional=optional, hint=hint
    ):
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: {columns.text} is {text!r:.60}; expected a string")
        if grouped:
            groups.append("" if (group := label.pop()) is None else str(group))
        x.append(text)
        labels.append(columns.parse(label, f"{path}, line {number}"))
    return columns.examples("text", x, labels, path, groups if any(groups) else ())


def class_folders(path: Path, exclude: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones and the excluded one."""
    return sorted(
        p for p in path.iterdir() if p.is_dir() and p.name[0] not in "._" and p.resolve() != exclude.resolve()
    )


def read_media(
    path: Path, sample_rate: int, grey: bool, size: int, on_file: Callable[[], None], classes: bool = True
) -> Examples:
    """Return the recordings or images of a folder or archive.

    The first folder of a file's path is its class; without `classes`, examples have no label. Images are resized to
    size x size pixels; 0 keeps their sizes.
    """
    x: list[np.ndarray] = []
    names: list[str] = []
    changes = Counter[str]()
    kind = ""
    expansion = None if path.is_dir() else Expansion(path)
    for name, content in read_members(path, is_media):
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
        if expansion is not None:
            expansion.add(item.nbytes)
        x.append(item)
        names.append(name)
        changes.update(notes)
        on_file()
    if not x:
        raise DataError(f"{path} has no {', '.join(MEDIA)} file, and is not a table ({', '.join(TABLES)})")
    labels: Sequence[Any] = _labels_from_paths(path, names) if classes else [None] * len(x)
    return Examples(kind, x, labels, str(path), names, changes)


def _labels_from_paths(path: Path, names: Sequence[str]) -> list[str]:
    parts = [name.split("/") for name in names]
    if path.is_file() and all(len(each) > 2 and each[0] == parts[0][0] for each in parts):
        parts = [each[1:] for each in parts]  # the archive of a folder has that folder as its only entry
    for each in parts:
        if len(each) < 2:
            raise DataError(
                f"{path}: {each[0]} is not in a folder; expected CLASS/{each[0]}, or a table labels.csv with the "
                "columns file and label"
            )
    return [each[0] for each in parts]


def is_media(name: str) -> bool:
    """Return whether a file is a visible recording or image."""
    return suffix(PurePosixPath(name)) in MEDIA and visible(name)


def visible(name: str) -> bool:
    """Return whether neither a file nor its folders are hidden or macOS's metadata (__MACOSX, or named ._)."""
    return not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)
