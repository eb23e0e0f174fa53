"""The prediction for one input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """The most likely class, the probability of every class, the number of positions seen, and preprocessing notes.

    A language model predicts the next symbol: its classes are the symbols of its vocabulary.
    """

    label: str
    probabilities: dict[str, float]
    length: int
    notes: list[str]


def softmax(logits: Tensor) -> np.ndarray:
    """Return the probabilities (B, classes) of logits as a float32 array."""
    return logits.float().softmax(-1).cpu().numpy()
