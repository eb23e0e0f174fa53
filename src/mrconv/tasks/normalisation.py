"""The normalisation of values by the statistics of the training data."""

from __future__ import annotations

import numpy as np


def normalisation(x: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Return the scale and shift that give values (..., channels) mean 0 and deviation 1 in each channel.

    They are numbers for one channel, else float32 arrays (channels,).
    """
    step = 256 if x.ndim > 2 else 2**20  # examples or positions at a time: avoids a copy of all data in float64
    pieces = [x[i : i + step] for i in range(0, len(x), step)]
    axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    mean = np.sum([piece.sum(axes, np.float64) for piece in pieces], 0) / count
    deviation = np.sqrt(np.sum([((piece - mean) ** 2).sum(axes) for piece in pieces], 0) / count)
    scale = 1 / np.where(deviation > 0, deviation, 1.0)
    shift = -mean * scale
    if len(mean) == 1:
        return float(scale[0]), float(shift[0])
    return scale.astype(np.float32), shift.astype(np.float32)
