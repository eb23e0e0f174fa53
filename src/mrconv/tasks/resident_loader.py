"""Batches gathered on the device that holds the whole split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from . import packing
from .cache import bounds
from .loaders import Batch, BatchLoader, Normaliser, label_tensor

UNPACK_EXAMPLES = 4096  # examples padded on the host at a time


class _Resident(NamedTuple):
    """Examples on the device, padded to the longest; their lengths on the host and on the device, if they differ."""

    x: Tensor
    host_lengths: np.ndarray | None = None
    lengths: Tensor | None = None


class ResidentLoader(BatchLoader):
    """Batches gathered on the device that holds the whole split in its stored dtype: no workers and no transfers."""

    def __init__(self, *args: Any, device: torch.device | str = "cuda", **options: Any) -> None:
        super().__init__(*args, **options)
        split, self.device = self.split, torch.device(device)
        if split.x.dtype.kind not in "uif":
            raise ValueError(f"{self.data.name} is a list of files, which a device cannot hold: use data_loader")
        self.labels, self.normalise = label_tensor(split).to(self.device), Normaliser(self.data, self.device)
        self.first = self._move(split.x, split.offsets)
        self.second = None if split.x2 is None else self._move(split.x2, split.offsets2)

    def _move(self, x: np.ndarray, offsets: np.ndarray | None) -> _Resident:
        """Pad the examples and move them to the device."""
        if offsets is None:
            return _Resident(torch.from_numpy(np.array(x)).to(self.device))
        starts, stops = bounds(offsets)
        lengths = stops - starts
        shape, dtype = (len(lengths), int(lengths.max()), *x.shape[1:]), torch.from_numpy(x[:0].copy()).dtype
        out = torch.empty(shape, dtype=dtype, device=self.device)
        for i in range(0, len(lengths), UNPACK_EXAMPLES):
            some = slice(i, i + UNPACK_EXAMPLES)
            out[some] = torch.from_numpy(packing.pad(x, starts[some], stops[some], shape[1]))
        return _Resident(out, lengths, torch.from_numpy(lengths).to(self.device))

    def _load(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        if not batches:
            return
        local = [self.plan.local(batch) for batch in batches]
        indices = torch.from_numpy(np.concatenate(local)).to(self.device)  # one transfer for the epoch
        for batch, index in zip(batches, indices.split([len(each) for each in local]), strict=True):
            y = self.labels.index_select(0, index)
            x, lengths = self._gather(self.first, batch, index)
            if self.second is None:
                yield Batch(x, self.cut_labels(y, x), lengths)
            else:
                yield Batch(x, y, lengths, *self._gather(self.second, batch, index))

    def _gather(self, resident: _Resident, batch: np.ndarray, index: Tensor) -> tuple[Tensor, Tensor | None]:
        x = resident.x.index_select(0, index)
        if resident.host_lengths is None or resident.lengths is None:
            return self.normalise(x), None
        width = self.padded_length(int(resident.host_lengths[batch].max()))
        if width > x.shape[1]:
            x = pad(x, (0, 0) * (x.ndim - 2) + (0, width - x.shape[1]))
        return self.normalise(x[:, :width]), resident.lengths.index_select(0, index)
