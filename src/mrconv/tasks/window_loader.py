"""Windows of one long text, gathered on the device that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from .base import Prepared
from .loaders import Batch, BatchLoader

IGNORED = -100
"""The label of a position that is not scored, as torch's cross-entropy has it."""


class WindowLoader(BatchLoader):
    """Batches of windows: tokens (B, length) and those one place on (B, length); takes what `BatchLoader` takes.

    In training, rows are windows that tile the text from an offset on, drawn for each pass from seed and epoch. In
    evaluation, row i predicts its own `length - context` characters, and its other labels are IGNORED.
    """

    of_texts: ClassVar[bool] = True

    def __init__(
        self, data: Prepared, split: str, batch_size: int, *, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(data, split, batch_size, **options)
        self.device, self.stride = torch.device(device), data.length - data.facts["context"]
        self.x, self.y = (torch.from_numpy(np.array(part)).to(self.device) for part in (self.split.x, self.split.y))

    def starts(self) -> np.ndarray:
        """Return where every window of this epoch begins."""
        rows, length = np.arange(self.plan.rows), self.data.length
        if not self.plan.train:
            return np.maximum(0, rows * self.stride - self.data.facts["context"])
        passes = self.data.facts["passes"]
        offsets = np.random.default_rng([self.plan.seed, self.epoch, 1]).integers(length, size=passes)
        each, place = np.divmod(rows, self.plan.rows // passes)
        return offsets[each] + place * length

    def _batches(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        if not rows:
            return
        rows = [self.plan.own(each) for each in rows]
        starts = torch.from_numpy(self.starts()).to(self.device)
        places = torch.arange(self.data.length, device=self.device)
        every = torch.from_numpy(np.concatenate(rows)).to(self.device)
        for index in every.split([len(each) for each in rows]):
            at = starts[index, None] + places
            if self.plan.train:
                yield Batch(self.x[at].long(), self.y[at].long())
                continue
            own = index[:, None] * self.stride
            scored = (at >= own) & (at < (own + self.stride).clamp(max=len(self.y)))
            at = at.clamp(max=len(self.y) - 1)
            yield Batch(self.x[at].long(), self.y[at].long().masked_fill(~scored, IGNORED))
