"""The base class of baselines that are one long convolution."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..kernels import resampled
from ..mixers import Mixer
from .kernel_cache import KernelCache
from .parameters import as_parameter, standard_normal, upcast


class LongConvolution(KernelCache, Mixer):
    """y = k * u + D u, with the kernel k that a subclass computes in `kernel`.

    Args:
        d_model: number of channels.
        l_max: number of taps.
        options: bidirectional (adds a second kernel, for future inputs), device and dtype.
    """

    reach: ClassVar[str] = "l_max"
    """Length of the kernel: "l_max", or "input" for a kernel that is as long as the input."""

    def __init__(self, d_model: int, l_max: int, **options: Any) -> None:
        super().__init__(d_model, l_max, **options)
        self.D = as_parameter(standard_normal(d_model), **self.factory)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the kernels (n_directions, d_model, length): for u[t], u[t-1], ... and for u[t+1], u[t+2], ..."""
        raise NotImplementedError

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Convolve once, with both directions and the skip D in one kernel."""
        L = x.shape[-1]
        taps = L if self.reach == "input" else min(L, resampled(self.l_max, rate))
        lead = taps if self.bidirectional else 0
        compute = functools.partial(self._joined_kernel, taps, rate)
        kernel = self.cached_kernel(lead, taps, compute) if rate == 1 else compute()
        fused = gelu and not torch.is_grad_enabled()  # the gradient of GELU needs its input
        y = ops.fft_conv(x, kernel, lead, gelu=fused)
        return F.gelu(y) if gelu and not fused else y

    def freeze(self) -> None:
        """Cache the kernel up to l_max, at rate 1."""
        self.cache_kernel(self._joined_kernel(self.l_max, 1.0), self.l_max if self.bidirectional else 0)

    def _joined_kernel(self, taps: int, rate: float) -> Tensor:
        """Return the reversed kernel of future inputs followed by that of past inputs, with D added at lag 0."""
        kernels = self.kernel(taps, rate)
        joined, lead = kernels[0], 0
        if self.bidirectional:
            joined, lead = torch.cat([kernels[1].flip(-1), joined], -1), taps
        return joined + F.pad(upcast(self.D)[:, None], (lead, joined.shape[-1] - lead - 1))
