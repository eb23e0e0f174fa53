"""Metrics of a model's outputs by target, with torchmetrics."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelConfusionMatrix,
    MultilabelExactMatch,
    MultilabelF1Score,
)
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, R2Score

from mrconv.tasks import Prepared
from mrconv.tasks.window_loader import IGNORED

from .scores import SCORES

THRESHOLDS = 200  # of the AUROC over positions, whose probabilities would need too much memory
PER_OUTPUT = ("_per_class", "_per_value", "confusion_matrix")
"""Ends of the names of metrics that are not one number."""


class MeanOverPresent(Metric):
    """The mean of a metric over the classes that occur in the labels; torchmetrics counts the others as 0.

    Args:
        by_class: the metric, with a value for each class.
        negatives: whether a class must also be absent from some labels, as for an AUROC.
    """

    full_state_update = False
    counts: Tensor
    total: Tensor

    def __init__(self, by_class: Metric, classes: int, negatives: bool = False) -> None:
        super().__init__()
        self.by_class, self.negatives = by_class, negatives
        self.add_state("counts", torch.zeros(classes), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Add a batch."""
        self.by_class.update(outputs, y)
        valid = y[y != IGNORED]
        self.counts += y.sum(0) if y.ndim == 2 else torch.bincount(valid, minlength=len(self.counts))
        self.total += len(y) if y.ndim == 2 else len(valid)

    def compute(self) -> Tensor:
        """Return the mean; NaN if no class is present."""
        present = (self.counts > 0) & ((self.counts < self.total) if self.negatives else True)
        return self.by_class.compute()[present].mean()

    def reset(self) -> None:
        """Remove all batches."""
        super().reset()
        self.by_class.reset()


def make_metrics(data: Prepared) -> dict[str, Metric]:
    """Return the metrics of the data's target by name, which are updated with the result of `activated`."""
    n = len(data.classes)
    options: dict[str, Any] = {"validate_args": False}
    if not n:
        return {}
    if data.target == "values":
        return {
            "mae": MeanAbsoluteError(),
            "rmse": MeanSquaredError(squared=False),
            "r2": R2Score(),
            "mae_per_value": MeanAbsoluteError(num_outputs=n),
            "rmse_per_value": MeanSquaredError(squared=False, num_outputs=n),
            "r2_per_value": R2Score(multioutput="raw_values"),
        }
    if data.target == "labels":
        return {
            "accuracy": MultilabelAccuracy(n, average="micro", **options),
            "exact_match": MultilabelExactMatch(n, **options),
            "f1": MultilabelF1Score(n, average="macro", **options),
            "auroc": MeanOverPresent(MultilabelAUROC(n, average=None, **options), n, negatives=True),
            "f1_per_class": MultilabelF1Score(n, average=None, **options),
            "confusion_matrix": MultilabelConfusionMatrix(n, **options),
        }
    options |= {"ignore_index": IGNORED}
    auroc = MulticlassAUROC(n, average=None, thresholds=THRESHOLDS if data.target == "positions" else None, **options)
    return {
        "accuracy": MulticlassAccuracy(n, average="micro", **options),
        "balanced_accuracy": MeanOverPresent(MulticlassAccuracy(n, average=None, **options), n),
        "f1": MulticlassF1Score(n, average="macro", **options),
        "auroc": MeanOverPresent(auroc, n, negatives=True),
        "f1_per_class": MulticlassF1Score(n, average=None, **options),
        "confusion_matrix": MulticlassConfusionMatrix(n, **options),
    }


def monitorable(data: Prepared) -> list[str]:
    """Return the names of the metrics that are one number."""
    own = [name for name in make_metrics(data) if not name.endswith(PER_OUTPUT)]
    return ["loss", *(own or [data.metric])]


def activated(outputs: Tensor, y: Tensor, target: str) -> tuple[Tensor, Tensor]:
    """Return outputs as probabilities or values (n, outputs), and their labels (n,) or (n, outputs)."""
    outputs = outputs.float()
    if target == "values":
        return outputs, y
    if target == "labels":
        return outputs.sigmoid(), y.long()
    return outputs.softmax(-1).flatten(0, -2), y.flatten()


class Metrics(nn.Module):
    """All metrics of one split."""

    sums: Tensor

    def __init__(self, data: Prepared) -> None:
        super().__init__()
        self.target, self.names = data.target, data.classes
        self.score, self.metrics = SCORES[data.metric], nn.ModuleDict(make_metrics(data))
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float64), persistent=False)  # loss, score, labels

    def update(self, outputs: Tensor, y: Tensor, loss: Tensor) -> None:
        """Add a batch and its mean loss."""
        total, count = self.score.sums(outputs, y, loss)
        self.sums += torch.stack([loss * count, total, count])
        if self.metrics:
            outputs, y = activated(outputs, y, self.target)
            for metric in self.metrics.values():
                metric.update(outputs, y)  # type: ignore[operator]

    def compute(self) -> dict[str, Any]:
        """Return numbers, numbers by output, and the confusion matrix as lists; None stands for undefined."""
        loss, score = (self.sums[:2] / self.sums[2]).unbind()
        values: dict[str, Any] = {"loss": value(loss)}
        for name, metric in self.metrics.items():
            result = computed(metric)  # type: ignore[arg-type]
            if name == "confusion_matrix":
                values[name] = result.tolist()
            elif name.endswith(PER_OUTPUT):
                each = map(value, result.reshape(-1).expand(len(self.names)))
                values[name] = dict(zip(self.names, each, strict=True))
            else:
                values[name] = value(result)
        return values | {self.score.name: value(score)}


def computed(metric: Metric) -> Tensor:
    """Return the value of a metric; NaN if there are too few examples for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of absent classes
        try:
            return metric.compute()
        except ValueError:
            return torch.tensor(math.nan)


def value(number: Tensor) -> float | None:
    """Return a number for JSON; None if it is not finite."""
    return float(number) if math.isfinite(number) else None
