"""Sparse kernels: l0 taps at random, fixed positions."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from .dilated import DilatedKernel
from .protocol import register_kernel

MAX_PERMUTATION = 2**20


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
        drawn = [_draw(n, self.kernel_size, draw) for n in self.lengths]
        index = torch.stack(drawn).sort(1).values
        self.register_buffer("index", index)
        self._drawn = self.positions
        self.index = index.to(self.taps.device)

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """The positions, read from the buffer `index`."""
        return self.integers("index")

    def reset_parameters(self) -> None:
        """Draw white taps of expected energy 1, and restore the positions drawn from the seed."""
        super().reset_parameters()
        self.index.copy_(torch.tensor(self._drawn))


def _draw(n: int, count: int, draw: torch.Generator) -> Tensor:
    """Return distinct numbers below n; a permutation of very many would not fit in memory."""
    if n <= MAX_PERMUTATION:
        return torch.randperm(n, generator=draw, device="cpu")[:count]
    return torch.tensor(random.Random(draw.initial_seed()).sample(range(n), count), device="cpu")
