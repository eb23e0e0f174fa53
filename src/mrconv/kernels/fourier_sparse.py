"""Linear rescaling: a weighted sum of kernels of equal length (the paper's second reparameterisation)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

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
        sizes = self.lengths
        smooth = torch.cat([k.expand(-1, n) for k, n in zip(self.fourier(), sizes, strict=True)], 1)
        offsets = [0, *itertools.accumulate(sizes)][:-1]
        index = torch.cat([at + offset for at, offset in zip(self.sparse.index.unbind(0), offsets, strict=True)])
        smooth_weight, sparse_weight = self.beta.to(smooth.dtype).unbind(0)
        taps = (self.sparse.taps.to(smooth.dtype) * sparse_weight[..., None]).transpose(0, 1).flatten(1)
        weights = zip(smooth_weight.unbind(0), sizes, strict=True)
        per_tap = torch.cat([weight[:, None].expand(-1, size) for weight, size in weights], 1)
        return list((smooth * per_tap).index_add(1, index, taps).split(sizes, 1))
