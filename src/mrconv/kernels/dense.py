"""Dense kernels: every tap is a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .protocol import Kernel, register_kernel


@register_kernel("dense")
class DenseKernel(Kernel):
    """l_i taps at resolution i, concatenated in one parameter (channels, sum of l_i)."""

    def build(self, seed: int, **factory: Any) -> None:
        """Create the taps."""
        self.taps = nn.Parameter(torch.empty(self.channels, sum(self.lengths), **factory))

    def reset_parameters(self) -> None:
        """Draw white kernels of expected energy 1."""
        for taps in self.taps.detach().split(self.lengths, 1):
            nn.init.normal_(taps, std=taps.shape[1] ** -0.5)

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the taps of each resolution."""
        return list(self.taps.split(self.lengths, 1))
