"""What models are scored by: accuracy, or bits per character."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from mrconv.tasks.window_loader import IGNORED


class Score(ABC):
    """A mean over examples, or over tokens."""

    name: ClassVar[str]
    """In tables of metrics and in records."""
    label: ClassVar[str]
    """Of an axis."""
    scale: ClassVar[float] = 1.0
    """From what is recorded to what is shown."""
    higher: ClassVar[bool]
    """Whether a higher score is a better one."""

    @abstractmethod
    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over a batch's labels, of which `loss` is the mean cross-entropy, and how many there are."""

    def better(self, new: float, old: float) -> bool:
        """Whether a score is better than another; every number is better than NaN."""
        if math.isnan(old):
            return not math.isnan(new)
        return new > old if self.higher else new < old

    @abstractmethod
    def text(self, value: float) -> str:
        """Return a score with its unit."""


class Accuracy(Score):
    """The share of right answers."""

    name = "accuracy"
    label = "accuracy, %"
    scale = 100.0
    higher = True

    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many answers are right, and how many there are."""
        right = logits.argmax(-1) == y
        return right.sum(), torch.full((), right.numel(), device=y.device)

    def text(self, value: float) -> str:
        """Return percent."""
        return f"{value:.2%}"


class Bits(Score):
    """Bits per token, of those that are not ignored: log2 of one over the probability the model gave it."""

    name = "bits"
    label = "bits per character"
    higher = False

    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bits of all tokens, and how many there are."""
        count = (y != IGNORED).sum()
        return loss.double() * count / math.log(2), count

    def text(self, value: float) -> str:
        """Return bits."""
        return f"{value:.3f} bits"


SCORES: dict[str, Score] = {each.name: each for each in (Accuracy(), Bits())}
