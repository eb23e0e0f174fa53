"""Packing of sequences of different lengths into one array, their padding, and random splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .cache import Arrays

SPLIT_SEED = 42


def pack(sequences: Sequence[np.ndarray], dtype: np.dtype | type) -> Arrays:
    """Return the sequences (length, ...) concatenated as `x`, and their boundaries as `offsets` (n + 1,)."""
    offsets = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
    x = np.empty((offsets[-1], *(sequences[0].shape[1:] if sequences else ())), dtype)
    for sequence, start in zip(sequences, offsets, strict=False):
        x[start : start + len(sequence)] = sequence
    return {"x": x, "offsets": offsets}


def pad(x: np.ndarray, starts: np.ndarray, stops: np.ndarray, length: int) -> np.ndarray:
    """Return the sequences x[start:stop] padded with zeros to a length."""
    out = np.zeros((len(starts), length, *x.shape[1:]), x.dtype)
    for sequence, start, stop in zip(out, starts, stops, strict=True):
        sequence[: stop - start] = x[start:stop]
    return out


def train_val_test(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> dict[str, Arrays]:
    """Return the arrays of three splits; val is the tenth of the training examples that S4 and its successors use."""
    train, val = random_split(len(y), (0.9, 0.1), SPLIT_SEED)
    return {
        "train": {"x": x[train], "y": y[train]},
        "val": {"x": x[val], "y": y[val]},
        "test": {"x": x_test, "y": y_test},
    }


def random_split(n: int, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    """Return sorted indices of random parts of n examples; the first part takes the remainder.

    The draw is that of `torch.utils.data.random_split`: seed 42 gives the splits of S4 and its successors.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
    sizes = [int(n * fraction) for fraction in fractions[1:]]
    stops = np.cumsum([n - sum(sizes), *sizes])
    return [np.sort(part) for part in np.split(order, stops[:-1])]
