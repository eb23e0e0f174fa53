"""Retrieval of Long Range Arena: does one paper of the ACL Anthology Network cite another? Texts are characters.

LRA's files hold each text as the Python representation of bytes, b'...': a newline is the two characters \\n, and bytes
beyond ASCII are \\x.. . S4 and its successors do not decode the texts, and neither does this task by default: the
vocabulary has at most 95 printable characters and 3 special symbols, the 98 symbols that S4 reports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Task, register_task
from .cache import Arrays, Built
from .errors import DataError
from .progress_callback import Progress, ProgressCounter
from .reading import reading
from .text_lines import read_lines
from .vocabulary import CharacterEncoder, character_vocabulary

FILES = {"train": "train", "val": "eval", "test": "test"}
FOLDERS = ("", "tsv_data/", "lra_release/tsv_data/", "lra_release/lra_release/tsv_data/")
LABELS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


@register_task("retrieval")
@dataclass(frozen=True)
class Retrieval(Task):
    """Classification of pairs of papers: does one cite the other?

    Args:
        length: each text is cut to length - 1 characters and <eos>.
        decode: decode b'...' to UTF-8 text; published results were obtained without it.
    """

    length: int = 4000
    decode: bool = False

    title: ClassVar[str] = "Retrieval: does one paper cite the other (LRA, AAN)"
    file_mib: ClassVar[int] = 64
    layout: ClassVar[str] = (
        "Put new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv there, or the lra_release of "
        "github.com/google-research/long-range-arena with its folder tsv_data."
    )

    def check(self) -> None:
        """Raise ValueError for an invalid length."""
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a character and <eos>; got {self.length}")

    def sources(self) -> Sequence[Path]:
        """Return the three files."""
        return [
            self._find_source(*(f"{folder}new_aan_pairs.{part}.tsv" for folder in FOLDERS)) for part in FILES.values()
        ]

    def build(self, progress: Progress) -> Built:
        """Read the training file for the vocabulary, then encode all three files; texts are never all in memory."""
        files = dict(zip(FILES, self.sources(), strict=True))
        count = ProgressCounter(progress, sum(file.stat().st_size for file in (files["train"], *files.values())))
        symbols = character_vocabulary(text for _, *pair in self._pairs(files["train"], count) for text in pair)
        encode = CharacterEncoder(symbols, self.length)
        return {split: _encode_pairs(self._pairs(file, count), encode) for split, file in files.items()}, {
            "encoder": "tokens",
            "classes": ["no citation", "citation"],
            "length": self.length,
            "vocabulary": list(symbols),
            "pair": True,
        }

    def _pairs(self, file: Path, count: ProgressCounter) -> Iterator[tuple[int, str, str]]:
        """Yield label and both texts of every line, which holds label, id, id, text, text, separated by tabs."""
        characters = 0
        for number, line in read_lines(file):
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
                count(characters)
                characters = 0
        count(characters)

    def _text(self, field: str, where: str) -> str:
        """Return a text, unquoted and cut."""
        if len(field) > 1 and field[0] == field[-1] == '"':  # quoted by a CSV writer
            field = field[1:-1].replace('""', '"')
        if self.decode and field[:2] in ("b'", 'b"'):
            with reading(f"{where}: {field[:40]}...", "is not a Python bytes literal of UTF-8", ""):
                field = ast.literal_eval(field).decode("utf-8")
        return field[: self.length - 1]


def _encode_pairs(pairs: Iterable[tuple[int, str, str]], encode: CharacterEncoder) -> Arrays:
    """Return the arrays of a split, without copying them: LRA's have a billion characters."""
    x, lengths, labels = (bytearray(), bytearray()), ([0], [0]), []
    for label, *texts in pairs:
        labels.append(label)
        for text, buffer, sizes in zip(texts, x, lengths, strict=True):
            tokens = encode(text)
            buffer += tokens.tobytes()
            sizes.append(len(tokens))
    x1, x2 = (np.frombuffer(buffer, encode.dtype) for buffer in x)
    offsets, offsets2 = (np.cumsum(sizes, dtype=np.int64) for sizes in lengths)
    return {"x": x1, "offsets": offsets, "x2": x2, "offsets2": offsets2, "y": np.array(labels, np.uint8)}
