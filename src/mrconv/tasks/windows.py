"""Windows of long sequences: where they start, for training and prediction alike, and the mean of their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def window_starts(length: int, window: int, hop: int) -> np.ndarray:
    """Return the first positions of the windows of a sequence: every `hop` positions, and one that ends with it.

    All windows are full and together cover the sequence. A sequence of up to `window` positions is one window.
    """
    last = max(0, length - window)
    return np.append(np.arange(0, last, hop), last)


def mean_of_windows(outputs: Sequence[np.ndarray], starts: Sequence[int] | None = None) -> np.ndarray:
    """Return the mean of the outputs of windows; with `starts`, of outputs (positions, ...) at every position."""
    if starts is None:
        return np.asarray(np.mean(outputs, 0, np.float64), np.float32)
    length = max(start + len(each) for start, each in zip(starts, outputs, strict=True))
    total, counts = np.zeros((length, *outputs[0].shape[1:]), np.float32), np.zeros(length, np.float32)
    for start, each in zip(starts, outputs, strict=True):
        total[start : start + len(each)] += each
        counts[start : start + len(each)] += 1
    return total / counts[:, None]
