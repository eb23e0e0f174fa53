"""The interface of all loaders: batches of a split, which depend on the seed and the epoch alone.

A loader can stop within an epoch and resume there.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from .base import Prepared, Split
from .batch_plan import BatchPlan


@dataclass(frozen=True)
class Batch:
    """A batch of examples.

    Args:
        x: tokens (B, L), values (B, L, C) or images (B, C, H, W).
        y: labels (B, ...), as in `Split`.
        lengths: lengths of the sequences (B,), if they differ.
        x2, lengths2: the second sequences of pairs.
    """

    x: Tensor
    y: Tensor
    lengths: Tensor | None = None
    x2: Tensor | None = None
    lengths2: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return replace(self, **{k: v.to(device, non_blocking=non_blocking) for k, v in self._tensors().items()})

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; DataLoader calls this."""
        return replace(self, **{k: v.pin_memory() for k, v in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}

    def __len__(self) -> int:
        return len(self.y)


class BatchLoader(ABC):
    """Batches of one split; each iteration is one epoch.

    Args:
        data, split: the data and the name of the split.
        batch_size: examples per batch and process.
        train: shuffle, and drop examples that do not fill a batch; by default for the split "train".
        seed: seed of the shuffling.
        rank, world: index of this process and number of processes.
        bucket: put examples of similar length into a batch.
        pad: "batch" pads to the longest example of the batch (in training, of all processes), a number n to the next
            multiple of n (so that batches have few shapes), "max" to the task's length.
    """

    windowed: ClassVar[bool] = False
    """Whether the loader cuts windows from one long text."""

    def __init__(
        self,
        data: Prepared,
        split: str,
        batch_size: int,
        *,
        train: bool | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        bucket: bool = False,
        pad: str | int = "batch",
    ) -> None:
        if split not in data.splits:
            raise ValueError(f"{data.name} has no split {split!r}; its splits are {', '.join(data.splits)}")
        if (data.encoder == "text") != self.windowed:
            raise ValueError(
                f"{type(self).__name__} cannot load {data.name}, whose encoder is {data.encoder!r}: use WindowLoader "
                "for 'text' and the other loaders for everything else"
            )
        if pad not in ("batch", "max") and (not isinstance(pad, int) or pad < 1):
            raise ValueError(f"pad must be 'batch', 'max' or a number of positions; got {pad!r}")
        self.data, self.split, self.pad = data, data.splits[split], pad
        lengths = self.split.lengths if bucket and self.split.offsets is not None else None
        train = split == "train" if train is None else train
        examples = data.examples_per_epoch(split, train)
        self.plan = BatchPlan(examples, batch_size, train, seed, rank, world, lengths)
        self.epoch = self.position = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of this epoch; the last one advances the loader to the next epoch."""
        for batch in self._load(self.plan.batches(self.epoch)[self.position :]):
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position; the batch last yielded counts as done."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.plan.seed, "batches": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the position of another loader."""
        for name, value in (("seed", self.plan.seed), ("batches", len(self))):
            if state[name] != value:
                raise ValueError(f"cannot resume: {name} was {state[name]} and is {value}")
        self.epoch, self.position = state["epoch"], state["position"]

    def without_augmentation(self) -> Self:
        """Return a copy with its own position and the same batches, whose examples are read as in evaluation."""
        return copy.copy(self)

    def padded_length(self, longest: int) -> int:
        """Return the padded length of a batch whose longest example has this length."""
        if self.pad == "max":
            return self.data.length
        step = 1 if self.pad == "batch" else int(self.pad)
        return min(-(-max(1, longest) // step) * step, max(longest, self.data.length))

    def cut_labels(self, y: Tensor, x: Tensor) -> Tensor:
        """Return labels of positions without the positions past the padded length of a batch, other labels as given."""
        return y[:, : x.shape[1]] if self.data.target == "positions" else y

    @abstractmethod
    def _load(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Load this process's share of batches, given by the indices of their examples."""


def label_tensor(split: Split) -> Tensor:
    """Return all labels: int64, or float32 for regression."""
    return torch.from_numpy(np.array(split.y)).to(torch.float32 if split.y.dtype.kind == "f" else torch.int64)


class Normaliser:
    """Converts stored examples of equal length to model inputs: token ids as int64, values scaled and shifted."""

    def __init__(self, data: Prepared, device: torch.device | str | None = None) -> None:
        self.encoder = data.encoder
        self.scale, self.shift = (
            torch.as_tensor(np.array(z, np.float32), device=device) for z in (data.scale, data.shift)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return model inputs; images as (B, C, H, W) views of (B, H, W, C)."""
        if self.encoder == "tokens":
            return x.long()
        x = x * self.scale + self.shift
        return x.permute(0, 3, 1, 2) if self.encoder == "image" else x
