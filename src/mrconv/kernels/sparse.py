"""Sparse kernels: l0 taps at random positions that never change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import register_kernel
from .dilated import DilatedKernel


@register_kernel("sparse")
class SparseKernel(DilatedKernel):
    """l0 taps at distinct positions in [0, l_i), drawn once from `seed`, shared by all channels.

    The positions are a buffer, saved and loaded with the model.
    """

    index: Tensor

    def build(self, seed: int, **factory: Any) -> None:
        """Create the taps and draw their positions."""
        super().build(seed, **factory)
        draw = torch.Generator().manual_seed(seed)
        rows = [torch.randperm(n, generator=draw, device="cpu")[: self.kernel_size] for n in self.lengths]
        index = torch.stack(rows).sort(1).values
        self._set_positions(index)
        self.register_buffer("index", index.to(self.taps.device))

    def reset_parameters(self) -> None:
        """Draw white taps of unit energy; their positions stay."""
        super().reset_parameters()
        self.index.copy_(torch.tensor(self.positions))

    def _set_positions(self, index: Tensor) -> None:
        self.positions = tuple(tuple(row) for row in index.tolist())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        index = state_dict.get(prefix + "index")
        if index is not None and index.shape == self.index.shape and not index.is_meta:
            self._set_positions(index)
        super()._load_from_state_dict(state_dict, prefix, *args)
