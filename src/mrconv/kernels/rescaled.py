"""Linear rescaling: kernels of equal length added up while training (the paper's second reparameterisation)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import Kernel, register_kernel
from .fourier import FourierKernel
from .sparse import SparseKernel


@register_kernel("fourier+sparse")
class FourierSparseKernel(Kernel):
    """beta[0] * fourier + beta[1] * sparse, beta learned per resolution and channel."""

    def build(self, seed: int, **factory: Any) -> None:
        """Create both kernels and their weights."""
        shape = (self.channels, self.lengths, self.kernel_size)
        self.fourier = FourierKernel(*shape, **factory)
        self.sparse = SparseKernel(*shape, seed=seed, **factory)
        self.beta = nn.Parameter(torch.empty(2, len(self.lengths), self.channels, **factory))

    def reset_parameters(self) -> None:
        """Draw both kernels and weigh them equally."""
        self.fourier.reset_parameters()
        self.sparse.reset_parameters()
        nn.init.constant_(self.beta, 0.5**0.5)

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the weighted sums, dense."""
        beta = self.beta[..., None]
        pairs = zip(self.fourier(), self.sparse(), self.sparse.index, strict=True)
        return [
            (beta[0, i] * smooth).index_add(1, index, (beta[1, i] * taps).to(smooth.dtype))
            for i, (smooth, taps, index) in enumerate(pairs)
        ]
