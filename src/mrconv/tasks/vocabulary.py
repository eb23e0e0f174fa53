"""Vocabularies of characters and the encoding of texts as token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

PADDING, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
SPECIAL = (PADDING, UNKNOWN, END)


def character_vocabulary(texts: Iterable[str], min_count: int = 1) -> tuple[str, ...]:
    """Return the special symbols, then the characters that occur at least `min_count` times, sorted."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return *SPECIAL, *sorted(character for character, n in counts.items() if n >= min_count)


def is_characters(vocabulary: Iterable[str]) -> bool:
    """Return whether all symbols but the special ones are single characters."""
    return all(len(symbol) == 1 for symbol in vocabulary if symbol not in SPECIAL)


class CharacterEncoder:
    """Encodes texts as token ids of their characters followed by <eos>, cut to a length that includes <eos>."""

    def __init__(self, vocabulary: Sequence[str], length: int) -> None:
        self.length = length
        self.table = np.full(0x110000, vocabulary.index(UNKNOWN), np.int16)
        for i, symbol in enumerate(vocabulary):
            if len(symbol) == 1:
                self.table[ord(symbol)] = i
        self.end = vocabulary.index(END)
        self.dtype = np.uint8 if len(vocabulary) <= 256 else np.int16

    def __call__(self, text: str) -> np.ndarray:
        """Return the token ids of one text."""
        code_points = np.frombuffer(text[: self.length - 1].encode("utf-32-le", "surrogatepass"), np.uint32)
        return np.append(self.table[code_points], self.end).astype(self.dtype)
