"""Retrieval of Long Range Arena: whether one paper of the ACL Anthology Network cites another, by characters.

LRA's files hold each text as Python writes bytes, b'...': a line's end is the two characters \\n there, and all beyond
ASCII is \\x.. . S4 and its successors read that as it is, and so does this: a vocabulary of at most 95 printable
characters and 3 special symbols, the 98 that they report.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Count, Task, register_task
from .cache import Arrays, Built
from .errors import DataError
from .packing import Characters, vocabulary
from .text_lines import lines

FILES = {"train": "train", "val": "eval", "test": "test"}
FOLDERS = ("", "tsv_data/", "lra_release/tsv_data/", "lra_release/lra_release/tsv_data/")
LABELS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


@register_task("retrieval")
@dataclass(frozen=True)
class Retrieval(Task):
    """Cited or not: pairs of papers, each cut to `length` - 1 characters and <eos>.

    `decode` reads b'...' as the UTF-8 text it stands for; that is not what published results were obtained with.
    """

    length: int = 4000
    decode: bool = False

    title: ClassVar[str] = "Retrieval: does one paper cite the other (LRA, AAN)"
    layout: ClassVar[str] = (
        "Put new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv there, or lra_release of "
        "github.com/google-research/long-range-arena with its folder tsv_data."
    )

    def check(self) -> None:
        """Refuse a length that makes no sense."""
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a character and the end; got {self.length}")

    def sources(self) -> Sequence[Path]:
        """Return the three files."""
        return [self._first(*(f"{folder}new_aan_pairs.{part}.tsv" for folder in FOLDERS)) for part in FILES.values()]

    def build(self, progress: Count) -> Built:
        """Read the training file for the vocabulary, then all three for the numbers: texts are never all in memory."""
        files = dict(zip(FILES, self.sources(), strict=True))
        total = sum(file.stat().st_size for file in (files["train"], *files.values()))
        done = 0

        def read(characters: int) -> None:
            nonlocal done
            done += characters
            progress(min(done, total), total)

        symbols = vocabulary(text for _, *pair in self._pairs(files["train"], read) for text in pair)
        encode = Characters(symbols, self.length)
        return {split: _encoded(self._pairs(file, read), encode) for split, file in files.items()}, {
            "encoder": "tokens",
            "classes": ["no citation", "citation"],
            "length": self.length,
            "vocabulary": list(symbols),
            "pair": True,
        }

    def _pairs(self, file: Path, read: Callable[[int], None]) -> Iterator[tuple[int, str, str]]:
        """Yield label and both texts of every line: label, two numbers, two texts, with tabs between them."""
        characters = 0
        for number, line in lines(file):
            if not line:
                continue
            fields = line.split("\t")
            if len(fields) != 5:
                raise DataError(f"{file}, line {number}: {len(fields)} columns; expected label, id, id, text, text")
            if fields[0] not in LABELS:
                raise DataError(f"{file}, line {number}: label is {fields[0]!r:.60}; expected 0, 0.0, 1 or 1.0")
            first, second = (self._text(text, f"{file}, line {number}") for text in fields[3:])
            yield LABELS[fields[0]], first, second
            characters += len(line)
            if number % 256 == 0:
                read(characters)
                characters = 0
        read(characters)

    def _text(self, field: str, where: str) -> str:
        """Return a text, cut."""
        if len(field) > 1 and field[0] == field[-1] == '"':  # as a CSV writer quotes it
            field = field[1:-1].replace('""', '"')
        if self.decode and field[:2] in ("b'", 'b"'):
            try:
                field = ast.literal_eval(field).decode("utf-8")
            except (SyntaxError, ValueError) as error:  # UnicodeDecodeError is a ValueError
                raise DataError(f"{where}: {field[:40]}... is not UTF-8 as Python writes bytes ({error})") from error
        return field[: self.length - 1]


def _encoded(pairs: Iterable[tuple[int, str, str]], encode: Characters) -> Arrays:
    """Return the arrays of a split, without a second copy of them: LRA's have a billion characters."""
    x, lengths, labels = (bytearray(), bytearray()), ([0], [0]), []
    for label, *texts in pairs:
        labels.append(label)
        for text, numbers, ends in zip(texts, x, lengths, strict=True):
            row = encode(text)
            numbers += row.tobytes()
            ends.append(len(row))
    x1, x2 = (np.frombuffer(numbers, encode.dtype) for numbers in x)
    offsets, offsets2 = (np.cumsum(ends, dtype=np.int64) for ends in lengths)
    return {"x": x1, "offsets": offsets, "x2": x2, "offsets2": offsets2, "y": np.array(labels, np.uint8)}
