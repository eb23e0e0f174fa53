"""Scores of models, such as accuracy or bits per character, and their averages over examples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from mrconv.tasks.window_loader import IGNORED

LOWER_IS_BETTER = ("loss", "bits", "mae", "rmse")
"""Of all metrics."""


def is_better(metric: str, new: float, old: float) -> bool:
    """Return whether a value of a metric is better than another; every number is better than NaN."""
    if math.isnan(old):
        return not math.isnan(new)
    return new < old if metric in LOWER_IS_BETTER else new > old


class Score(ABC):
    """A score that is a mean over examples or tokens."""

    name: ClassVar[str]
    """The name in tables of metrics and in records."""
    label: ClassVar[str]
    """The label of an axis."""
    scale: ClassVar[float] = 1.0
    """The factor from recorded to plotted values."""

    @abstractmethod
    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the score over the labels of a batch and their number; `loss` is their mean loss."""

    @property
    def higher(self) -> bool:
        """Whether higher is better."""
        return self.name not in LOWER_IS_BETTER

    @abstractmethod
    def text(self, value: float) -> str:
        """Return a score with its unit."""


class Accuracy(Score):
    """The fraction of correct predictions: of examples, of positions with a label, or of pairs of example and label."""

    name = "accuracy"
    label = "accuracy, %"
    scale = 100.0

    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of correct predictions and of predictions."""
        if y.ndim == logits.ndim:  # 0 and 1 for each label
            return ((logits > 0) == (y > 0.5)).sum(), torch.full((), y.numel(), device=y.device)
        return (logits.argmax(-1) == y).sum(), (y != IGNORED).sum()

    def text(self, value: float) -> str:
        """Return the score in percent."""
        return f"{value:.2%}"


class Bits(Score):
    """Bits per token that is not ignored: minus log2 of the token's predicted probability."""

    name = "bits"
    label = "bits per character"

    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bits of all tokens and their number."""
        count = (y != IGNORED).sum()
        return loss.double() * count / math.log(2), count

    def text(self, value: float) -> str:
        """Return the score in bits."""
        return f"{value:.3f} bits"


class MeanAbsoluteError(Score):
    """The mean absolute error of values, in their units."""

    name = "mae"
    label = "mean absolute error"

    def sums(self, logits: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the errors and the number of values."""
        return (logits.double() - y).abs().sum(), torch.full((), y.numel(), device=y.device)

    def text(self, value: float) -> str:
        """Return the error with four digits."""
        return f"mae {value:.4g}"


SCORES: dict[str, Score] = {each.name: each for each in (Accuracy(), Bits(), MeanAbsoluteError())}


class RunningScore(nn.Module):
    """Mean loss and score of the examples since the last reset, over all processes."""

    def __init__(self, metric: Score) -> None:
        super().__init__()
        self.metric = metric
        # nan_strategy: its checks would synchronise with the device at every step
        self.loss, self.total, self.count = (SumMetric(nan_strategy="disable") for _ in range(3))
        for each in self._metrics():
            each.set_dtype(torch.float64)
            each.persistent(True)  # saved in checkpoints, so that a resumed epoch counts all its examples

    def _metrics(self) -> tuple[Metric, ...]:
        return self.loss, self.total, self.count

    def update(self, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        """Add a batch and its mean loss."""
        total, count = self.metric.sums(logits, y, loss)
        for each, value in zip(self._metrics(), (loss * count, total, count), strict=True):
            each.update(value)

    def compute_and_reset(self) -> dict[str, Tensor]:
        """Return mean loss and score, and reset; return an empty dictionary if there was no batch."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not distributed and not self.count.update_called:
            return {}
        loss, total, count = (each.compute() for each in self._metrics())
        self.reset()
        return {"loss": loss / count, self.metric.name: total / count}

    def reset(self) -> None:
        """Remove all examples."""
        for each in self._metrics():
            each.reset()
