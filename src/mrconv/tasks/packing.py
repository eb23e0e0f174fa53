"""Rows of different lengths, packed one after the other; vocabularies; random splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from .cache import Arrays

PADDING, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
SPECIAL = (PADDING, UNKNOWN, END)


def packed(rows: Sequence[np.ndarray], dtype: np.dtype | type) -> Arrays:
    """Return the rows as x and offsets."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    x = np.empty(offsets[-1], dtype)
    for row, start in zip(rows, offsets, strict=False):
        x[start : start + len(row)] = row
    return {"x": x, "offsets": offsets}


def vocabulary(texts: Iterable[str], least: int = 1) -> tuple[str, ...]:
    """Return padding, unknown, end, and the characters that occur at least so often, in their order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return *SPECIAL, *sorted(character for character, n in counts.items() if n >= least)


class Characters:
    """Turns texts into the numbers of their characters, cut to a length that includes the end."""

    def __init__(self, vocabulary: Sequence[str], length: int) -> None:
        self.length = length
        self.table = np.full(0x110000, vocabulary.index(UNKNOWN), np.int16)
        for i, symbol in enumerate(vocabulary):
            if len(symbol) == 1:
                self.table[ord(symbol)] = i
        self.end = vocabulary.index(END)
        self.dtype = np.uint8 if len(vocabulary) <= 256 else np.int16

    def __call__(self, text: str) -> np.ndarray:
        """Return the numbers of one text."""
        codes = np.frombuffer(text[: self.length - 1].encode("utf-32-le", "surrogatepass"), np.uint32)
        return np.append(self.table[codes], self.end).astype(self.dtype)


def random_parts(n: int, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    """Return sorted indices of parts of n rows; the first takes what the others leave.

    Drawn as `torch.utils.data.random_split` does, so that seed 42 gives the split that S4 and its successors use.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
    sizes = [int(n * fraction) for fraction in fractions[1:]]
    stops = np.cumsum([n - sum(sizes), *sizes])
    return [np.sort(part) for part in np.split(order, stops[:-1])]
