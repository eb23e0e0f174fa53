"""Windows of one long text, gathered on the device that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from .base import Prepared
from .loaders import Batch, BatchLoader

IGNORED = -100
"""Label of a position that is not scored: the default `ignore_index` of torch's cross-entropy."""


class WindowLoader(BatchLoader):
    """Batches of windows: tokens (B, length) and the tokens that follow each of them (B, length).

    In training, windows tile the text from an offset that is drawn for each pass from seed and epoch. In evaluation,
    window i scores `length - context` characters; all its other labels are IGNORED. Options are those of `BatchLoader`.
    """

    windowed: ClassVar[bool] = True

    def __init__(
        self, data: Prepared, split: str, batch_size: int, *, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(data, split, batch_size, **options)
        self.device, self.stride = torch.device(device), data.length - data.facts["context"]
        self.x, self.y = (torch.from_numpy(np.array(part)).to(self.device) for part in (self.split.x, self.split.y))

    def starts(self) -> np.ndarray:
        """Return the first position of every window of this epoch."""
        windows, length = np.arange(self.plan.examples), self.data.length
        if not self.plan.train:
            return np.maximum(0, windows * self.stride - self.data.facts["context"])
        passes = self.data.facts["passes"]
        offsets = np.random.default_rng([self.plan.seed, self.epoch, 1]).integers(length, size=passes)
        number, place = np.divmod(windows, self.plan.examples // passes)
        return offsets[number] + place * length

    def _load(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        if not batches:
            return
        local = [self.plan.local(batch) for batch in batches]
        starts = torch.from_numpy(self.starts()).to(self.device)
        positions = torch.arange(self.data.length, device=self.device)
        indices = torch.from_numpy(np.concatenate(local)).to(self.device)
        for index in indices.split([len(each) for each in local]):
            at = starts[index, None] + positions
            if self.plan.train:
                yield Batch(self.x[at].long(), self.y[at].long())
                continue
            first = index[:, None] * self.stride
            scored = (at >= first) & (at < (first + self.stride).clamp(max=len(self.y)))
            at = at.clamp(max=len(self.y) - 1)
            yield Batch(self.x[at].long(), self.y[at].long().masked_fill(~scored, IGNORED))
