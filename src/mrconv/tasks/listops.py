"""ListOps (Nangia & Bowman, 2018) as in Long Range Arena: LRA's files, or expressions drawn by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mrconv._utils.checks import check_choice, check_positive_int

from .base import Count, Task, register_task
from .cache import Arrays, Built
from .errors import DataError, MissingData
from .packing import END, SPECIAL, packed
from .text_lines import lines

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
VOCABULARY = (*SPECIAL, *SYMBOLS)
"""18: padding, unknown, end, the digits, the operators, the closing bracket, always in this order."""
CODES = {symbol: i for i, symbol in enumerate(VOCABULARY) if symbol not in SPECIAL}
CODES["X"] = CODES["]"]  # LRA's own loader writes it so, and files made from that exist
OPERATORS = bytes(CODES[symbol] for symbol in SYMBOLS if symbol.startswith("["))
END_CODE = VOCABULARY.index(END)
NO_PARENTHESES = str.maketrans("", "", "()")
FOLDERS = ("", "listops-1000/", "lra_release/listops-1000/", "lra_release/lra_release/listops-1000/")
SPLITS = ("train", "val", "test")


@register_task("listops")
@dataclass(frozen=True)
class ListOps(Task):
    """Value of a nested expression of digits, MIN, MAX, MED and SM: 10 classes.

    `source`: "files" (basic_{train,val,test}.tsv of LRA), "generate", or "auto": the files if they are there. Only
    what is generated depends on `seed` and the options after it. A sequence is cut to `length` - 1 symbols and <eos>.
    """

    length: int = 2048
    source: str = "auto"
    seed: int = 0
    train_size: int = 96_000
    val_size: int = 2_000
    test_size: int = 2_000
    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10

    title: ClassVar[str] = "ListOps: the value of nested list operations (LRA)"
    layout: ClassVar[str] = (
        "Put basic_train.tsv, basic_val.tsv and basic_test.tsv there, or lra_release of "
        "github.com/google-research/long-range-arena with its folder listops-1000; or choose source='generate'."
    )

    def check(self) -> None:
        """Refuse an unknown source and sizes that make no sense."""
        check_choice("source", self.source, ("auto", "files", "generate"))
        check_positive_int(train_size=self.train_size, val_size=self.val_size, test_size=self.test_size)
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a symbol and the end; got {self.length}")

    def sources(self) -> Sequence[Path]:
        """Return LRA's three files, or none where expressions are generated."""
        found: list[Path] = []
        missing: MissingData | None = None
        for split in SPLITS if self.source != "generate" else ():
            try:
                found.append(self._first(*(f"{folder}basic_{split}.tsv" for folder in FOLDERS)))
            except MissingData as error:
                missing = error
        # one file without the others is a mistake: no generated data in its place
        if missing is not None and (found or self.source == "files"):
            raise missing
        return found

    def build(self, progress: Count) -> Built:
        """Read the files, or generate."""
        files = self.sources()
        splits, facts = self._read(files, progress) if files else self._generate(progress)
        return splits, {
            "encoder": "tokens",
            "classes": list("0123456789"),
            "length": self.length,
            "vocabulary": list(VOCABULARY),
            **facts,
        }

    def _read(self, files: Sequence[Path], progress: Count) -> Built:
        splits = {}
        done, total = 0, sum(file.stat().st_size for file in files)
        for split, file in zip(SPLITS, files, strict=True):
            rows: list[np.ndarray] = []
            targets: list[int] = []
            columns: list[str] | None = None
            for number, line in lines(file):
                done += len(line)
                if columns is None:
                    columns = line.split("\t")
                    if not {"Source", "Target"} <= set(columns):
                        raise DataError(f"{file}, line 1: expected columns Source and Target; got {line[:60]!r}")
                elif line:
                    fields = line.split("\t")
                    if len(fields) != len(columns):
                        raise DataError(f"{file}, line {number}: {len(fields)} columns; expected {len(columns)}")
                    row = dict(zip(columns, fields, strict=True))
                    codes = self._codes(row["Source"], f"{file}, line {number}")
                    if row["Target"] not in set("0123456789"):
                        raise DataError(f"{file}, line {number}: Target is {row['Target']!r}; expected 0 to 9")
                    rows.append(self._row(codes))
                    targets.append(int(row["Target"]))
                    if number % 1000 == 0:
                        progress(done, total)
            splits[split] = self._arrays(rows, np.array(targets, np.uint8))
        return splits, {"source": "files"}

    @staticmethod
    def _codes(source: str, where: str) -> np.ndarray:
        words = source.translate(NO_PARENTHESES).split()
        try:
            codes = bytes(map(CODES.__getitem__, words))
        except KeyError as error:
            raise DataError(f"{where}: {error} is none of {' '.join(SYMBOLS)}") from error
        closings = codes.count(CODES["]"])
        operators = len(words) - len(codes.translate(None, OPERATORS))
        if not codes or operators != closings:
            raise DataError(
                f"{where}: {len(words)} symbols, {operators} operators, {closings} closing brackets: cut off?"
            )
        return np.frombuffer(codes, np.uint8)

    def _generate(self, progress: Count) -> Built:
        try:
            from .generators.listops_expressions import generate
        except ImportError as error:
            raise DataError(f"generating ListOps needs {error.name}: pip install 'mrconv[data]'") from error
        sizes = [self.train_size, self.val_size, self.test_size]
        made = 0

        def count(more: int) -> None:
            nonlocal made
            made += more
            progress(made, sum(sizes))

        expressions = generate(
            sum(sizes),
            self.seed,
            max_depth=self.max_depth,
            max_args=self.max_args,
            min_length=self.min_length,
            max_length=self.max_length,
            progress=count,
        )
        rows = [self._row(expressions[i] + len(SPECIAL)) for i in range(len(expressions))]
        stops = np.cumsum(sizes)
        splits = {
            split: self._arrays(rows[stop - size : stop], expressions.targets[stop - size : stop])
            for split, stop, size in zip(SPLITS, stops, sizes, strict=True)
        }
        return splits, {"source": "generated", "draws": expressions.draws}

    def _row(self, codes: np.ndarray) -> np.ndarray:
        """Return the codes as uint8, cut, with the end after them."""
        row = np.full(min(len(codes), self.length - 1) + 1, END_CODE, np.uint8)
        row[:-1] = codes[: self.length - 1]
        return row

    @staticmethod
    def _arrays(rows: Sequence[np.ndarray], targets: np.ndarray) -> Arrays:
        return {**packed(rows, np.uint8), "y": targets}
