"""What a model predicts, by the target of the data: its model class, its loss, and the units of its outputs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mrconv import SequenceClassifier, SequenceLabeller, SequenceRegressor
from mrconv.hub import Model
from mrconv.tasks import Prepared
from mrconv.tasks.preview import label_counts
from mrconv.tasks.window_loader import IGNORED


class Target(nn.Module):
    """One class for each example, or for each next token: cross-entropy. Base class of the other targets.

    Args:
        data: the data, from whose training split weights and units come.
        smoothing: label smoothing of the training loss.
        class_weights: weights of the classes in the training loss: "none", "balanced", or a number for each.
    """

    model: ClassVar[type[Model]] = SequenceClassifier
    weights: Tensor | None

    def __init__(self, data: Prepared | None = None, smoothing: float = 0.0, class_weights: Any = "none") -> None:
        super().__init__()
        weights = None if data is None else weights_of_classes(data, class_weights)
        self.smoothing = smoothing
        self.register_buffer("weights", weights, persistent=False)

    def model_options(self, outputs: int, pool: str) -> dict[str, Any]:
        """Return the options of the model's head."""
        return {"n_classes": outputs, "pool": pool}

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return a model's outputs during training in the units of the labels; logits have none."""
        return outputs

    def fold_units(self, model: nn.Module) -> None:
        """Change a trained model so that its outputs are in the units of the labels."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return cross_entropy(outputs, y)

    def training_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss with smoothed labels and weighted classes."""
        return cross_entropy(outputs, y, self.smoothing, self.weights)

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels that a score compares: of mixed images, the more probable class."""
        return y.argmax(-1) if y.is_floating_point() else y


class Labels(Target):
    """Any number of classes for each example: binary cross-entropy of each class.

    A weight multiplies the loss of the examples that have the label.
    """

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over examples and classes."""
        return F.binary_cross_entropy_with_logits(outputs.float(), y)

    def training_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss with smoothed labels and weighted classes."""
        y = y * (1 - self.smoothing) + self.smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs.float(), y, pos_weight=self.weights)

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels."""
        return y


class Values(Target):
    """One or several numbers for each example: mean squared error of values standardised by the training split.

    A model in training predicts standardised values. A recorded model predicts in the units of the data: mean and scale
    are part of its head, so that `predict`, `export` and streams need no other file.
    """

    model = SequenceRegressor
    mean: Tensor
    scale: Tensor

    def __init__(self, data: Prepared, smoothing: float = 0.0, class_weights: Any = "none") -> None:
        super().__init__(data, smoothing, class_weights)
        y = np.asarray(data.splits["train"].y, np.float64)
        deviation = y.std(0)
        for name, z in (("mean", y.mean(0)), ("scale", np.where(deviation > 0, deviation, 1.0))):
            self.register_buffer(name, torch.tensor(z, dtype=torch.float32), persistent=False)

    def model_options(self, outputs: int, pool: str) -> dict[str, Any]:
        """Return the options of the model's head."""
        return {"n_outputs": outputs, "pool": pool}

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return values in the units of the data."""
        return outputs.float() * self.scale + self.mean

    @torch.no_grad()
    def fold_units(self, model: nn.Module) -> None:
        """Scale and shift the model's head."""
        head: Any = model.head
        head.weight.mul_(self.scale[:, None])
        head.bias.mul_(self.scale).add_(self.mean)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error, relative to the variance of the training split."""
        return ((outputs.float() - y) / self.scale).square().mean()

    training_loss = loss

    def labels(self, y: Tensor) -> Tensor:
        """Return the values."""
        return y


class Positions(Target):
    """One class for each position: cross-entropy over the positions with a label."""

    model = SequenceLabeller

    def model_options(self, outputs: int, pool: str) -> dict[str, Any]:
        """Return the options of the model's head, which does not pool."""
        return {"n_classes": outputs}


TARGETS: dict[str, type[Target]] = {"class": Target, "labels": Labels, "values": Values, "positions": Positions}


def weights_of_classes(data: Prepared, given: Any) -> Tensor | None:
    """Return the weights of the classes in the training loss.

    "balanced" gives all classes the same total weight and examples the mean weight 1; for target "labels", the examples
    with a label the total weight of those without.
    """
    if given == "none":
        return None
    if not data.classes or data.target == "values":
        raise ValueError(f"class_weights={given} is for classes; {data.name} has none")
    if given == "balanced":
        counts = label_counts(data, data.splits["train"])
        total = len(data.splits["train"]) if data.target == "labels" else counts.sum()
        ratio = total - counts if data.target == "labels" else total / len(counts)
        return torch.tensor(ratio / np.maximum(counts, 1), dtype=torch.float32)
    if len(given) != len(data.classes):
        names = ", ".join(data.classes)
        raise ValueError(f"class_weights has {len(given)} numbers; {data.name} has the classes {names:.200}")
    return torch.tensor(given, dtype=torch.float32)


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of logits (..., classes) over labels that are not ignored.

    Labels y are integers (...), or probabilities (..., classes). With weights of the classes, the mean is weighted.
    """
    labels = y.flatten(0, -2) if y.is_floating_point() else y.flatten()
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, labels, weights, ignore_index=IGNORED, label_smoothing=smoothing)
