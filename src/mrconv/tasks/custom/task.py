"""A user's own data, from files of the usual kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..base import Count, Task, register_task
from ..cache import Built
from ..errors import DataError, MissingData
from ..packing import random_parts
from . import arrays as own_arrays
from .files import (
    ARCHIVES,
    MEDIA,
    SPLITS,
    TABLES,
    Rows,
    class_folders,
    read_jsonl,
    read_media,
    read_npz,
    read_table,
    suffix,
)

NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


@register_task("folder")
@dataclass(frozen=True)
class Own(Task):
    """Classify your own sequences: `path` is a file or a folder, and what is there says what they are.

    - `.npz` with x and y, or x_train, y_train, and the same for val and test. Integers x (n, length) are tokens, all
      else (n, length[, channels]) is values; those are stored as float32 unless they are uint8 or int16.
    - `.csv` or `.tsv` with a header: a column of labels, and one of texts or else numbers in all the others;
      `.jsonl` or `.jsonl.xz` with a text and a label in each line. Texts are sequences of characters.
    - a folder or archive with a folder of recordings (WAV, FLAC) or pictures (PNG, JPEG) for each class.

    A folder may hold each of these as train, val and test (train.csv, test.csv; train.zip; train/); then those are the
    splits, whether there is a val or not. Where there is only one part, val and test are drawn from it by `seed`.
    Values are normalised by mean and standard deviation of each channel in the training rows, padding included.

    Args:
        length: of the sequences, 0 for the longest. Texts are cut to it, <eos> included. Of the others, what is longer
            is refused, unless `cut`; recordings and values that are shorter are padded with zeros on the right.
        rate: samples a second of the recordings.
        grey: turn colour pictures into grey ones.
        sequence: read pictures as sequences of pixels, row by row; if not, as images (height, width, channels).
    """

    path: str = ""
    length: int = 0
    cut: bool = False
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 42
    label_column: str = "label"
    text_column: str = "text"
    rate: int = 16000
    grey: bool = False
    sequence: bool = True

    title: ClassVar[str] = "your own data: arrays, tables, texts, recordings or pictures"

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.length < 0:
            raise ValueError(f"length must be 0, for the longest, or more; got {self.length}")
        val, test = self.val_fraction, self.test_fraction
        if not (val >= 0 and test >= 0 and val + test < 1):
            raise ValueError(f"val_fraction and test_fraction must be 0 or more, in all below 1; got {val} and {test}")

    def sources(self) -> Sequence[Path]:
        """Return the files, and of folders the ones of each class: the cache may lie beside them."""
        found: list[Path] = []
        for path in self._files().values():
            found += class_folders(path, self._cache) if path.is_dir() else [path]
        return found

    def build(self, progress: Count) -> Built:
        """Read, split where no split is given, and encode."""
        parts = self._read(progress)
        for rows in parts.values():
            if len(rows.labels) == 0:
                raise DataError(f"{rows.where} has no row")
        kinds = {rows.kind: rows.where for rows in parts.values()}
        if len(kinds) > 1:
            found = " and ".join(f"{kind} in {where}" for kind, where in kinds.items())
            raise DataError(f"{self.path}: expected rows of one kind; found {found}")
        if len(parts) == 1:
            (rows,) = parts.values()
            classes, parts = own_arrays.class_names(rows.labels), self._drawn(rows)
        else:  # a class that is nowhere trained is a mistake, not a class
            classes = own_arrays.class_names(parts["train"].labels)
        if len(classes) < 2:
            raise DataError(f"{self.path}: expected at least two classes; all rows are {classes[0]}")
        (kind,) = kinds
        arrays, facts = self._encoded(kind, parts)
        for split, rows in parts.items():
            arrays[split]["y"] = own_arrays.numbered(rows, classes)
        return arrays, {"classes": classes, "kind": kind, **facts}

    @property
    def _cache(self) -> Path:
        return self.cache_dir or self.data_dir / "cache"

    def _files(self) -> dict[str, Path]:
        """Return the file or folder of each split, or of "all"."""
        if not self.path:
            raise MissingData("folder: the option path must name a file or folder with your data; it is empty")
        root = Path(self.path).expanduser()
        if not root.exists():
            raise MissingData(f"path {self.path} is not there: looked for {root.absolute()}")
        if root.is_file():
            return {"all": root}
        inside = sorted(p for p in root.iterdir() if p.is_dir() or suffix(p) in (*TABLES, *ARCHIVES))
        found: dict[str, Path] = {}
        for split, names in NAMES.items():
            here = [p for p in inside if (p.name if p.is_dir() else p.name.removesuffix(suffix(p))) in names]
            if len(here) > 1:
                raise DataError(f"{here[0]} and {here[1].name} are both there: which one is {split}?")
            if here:
                found[split] = here[0]
        if found and "train" not in found:
            raise DataError(f"{root} has {', '.join(p.name for p in found.values())}; expected train too")
        if found:
            return found if len(found) > 1 else {"all": found["train"]}
        files = [p for p in inside if p.is_file()]
        if class_folders(root, self._cache) or not files:
            return {"all": root}
        if len(files) > 1:
            raise DataError(f"{root} has {', '.join(p.name for p in files)}: give one as path or call them train, test")
        return {"all": files[0]}

    def _read(self, progress: Count) -> dict[str, Rows]:
        done = 0

        def report() -> None:
            nonlocal done
            done += 1
            if done % 100 == 0:
                progress(done, None)

        parts: dict[str, Rows] = {}
        for split, path in self._files().items():
            if path.is_file() and suffix(path) == ".npz":
                found = read_npz(path)
                if split != "all" and "all" not in found:
                    raise DataError(f"{path} has arrays of {', '.join(found)}; expected x and y, being {split} by name")
                parts |= found if split == "all" else {split: found["all"]}
            else:
                parts[split] = self._rows(path, report)
        if len(parts) > 1 and "train" not in parts:
            raise DataError(f"{self.path} has {', '.join(parts)}; expected train too")
        return parts

    def _rows(self, path: Path, report: Callable[[], None]) -> Rows:
        if path.is_dir():
            rows = read_media(path, self.rate, self.grey, report)
            for folder in class_folders(path, self._cache):
                if folder.name not in rows.labels:
                    raise DataError(f"{folder} has no {', '.join(MEDIA)} file: expected some of this class")
            return rows
        if suffix(path) in (".csv", ".tsv"):
            return read_table(path, self.label_column, self.text_column)
        if suffix(path) in (".jsonl", ".jsonl.xz"):
            return read_jsonl(path, self.label_column, self.text_column)
        if suffix(path) in ARCHIVES:
            return read_media(path, self.rate, self.grey, report)
        raise DataError(f"{path} is of no known kind; expected {', '.join((*TABLES, *ARCHIVES))} or a folder")

    def _drawn(self, rows: Rows) -> dict[str, Rows]:
        n, fractions = len(rows.labels), (0.0, self.val_fraction, self.test_fraction)
        drawn = dict(zip(SPLITS, random_parts(n, fractions, self.seed), strict=True))
        for split, fraction in zip(SPLITS, fractions, strict=True):
            if split != "train" and fraction == 0:
                del drawn[split]
            elif len(drawn[split]) == 0:
                raise DataError(f"{rows.where} has {n} rows: too few for {split} with {split}_fraction={fraction:g}")
        return {split: rows.taken(part) for split, part in drawn.items()}

    def _encoded(self, kind: str, parts: dict[str, Rows]) -> own_arrays.Encoded:
        if kind == "text":
            return own_arrays.texts(parts, self.length)
        if kind == "tokens":
            return own_arrays.tokens(parts, self.length, self.cut)
        if kind == "values":
            return own_arrays.values(parts, self.length, self.cut)
        if kind == "audio":
            return own_arrays.recordings(parts, self.length, self.cut, self.rate)
        return own_arrays.pictures(parts, self.length, self.sequence)
