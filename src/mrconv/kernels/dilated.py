"""Dilated kernels: l0 taps at every resolution, at doubling distances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .protocol import Kernel, register_kernel


@register_kernel("dilated")
class DilatedKernel(Kernel):
    """l0 taps spaced l_i / l0 apart."""

    def build(self, seed: int, **factory: Any) -> None:
        """Create the taps."""
        self.taps = nn.Parameter(torch.empty(len(self.lengths), self.channels, self.kernel_size, **factory))

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """Multiples of the spacing."""
        return tuple(tuple(range(0, n, n // self.kernel_size)) for n in self.lengths)

    def reset_parameters(self) -> None:
        """Draw white taps of expected energy 1."""
        nn.init.normal_(self.taps, std=self.kernel_size**-0.5)

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the taps of each resolution."""
        return list(self.taps.unbind(0))
