"""Linear rescaling: a weighted sum of kernels of equal length (the paper's second reparameterisation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import Mixture, synthesize_packed, synthesize_with_taps
from .fourier import FourierKernel
from .protocol import Kernel, register_kernel
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
        """Initialise both kernels and set equal weights."""
        self.fourier.reset_parameters()
        self.sparse.reset_parameters()
        nn.init.constant_(self.beta, 0.5**0.5)

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the weighted sums, dense."""
        scales = [n**0.5 for n in self.lengths]
        return synthesize_with_taps(
            self.fourier.modes, self.sparse.taps, self.sparse.index, self.beta, self.lengths, scales
        )

    @classmethod
    def packed(cls, directions: Sequence[Kernel], counts: Sequence[int]) -> Tensor | None:
        """Return the first taps of all kernels."""
        kernels = [kernel for kernel in directions if isinstance(kernel, FourierSparseKernel)]
        lengths = [n for kernel in kernels for n in kernel.lengths]
        mixtures = [Mixture(kernel.beta, kernel.sparse.taps, kernel.sparse.index) for kernel in kernels]
        modes, scales = [kernel.fourier.modes for kernel in kernels], [n**0.5 for n in lengths]
        return synthesize_packed(modes, lengths, counts, scales, mixtures)
