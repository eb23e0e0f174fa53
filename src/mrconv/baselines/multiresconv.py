"""MultiresConv, of MultiresNet: one pair of filters at all dilations (Shi et al., 2023, "Sequence Modeling...")."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from .._utils.checks import check_choice, check_positive_int
from ..mixers import Mixer
from .kernel_cache import KernelCache
from .parameters import as_parameter, uniform, upcast


class MultiresConv(KernelCache, Mixer):
    """A causal wavelet tree of shared filters h0, h1, and a weighted sum of its coefficients.

    a_0 = u;  a_{j+1}[t] = sum_k h0[k] a_j[t - 2^j k],  b_{j+1}[t] = sum_k h1[k] a_j[t - 2^j k],  j < J

    fading:   y = w_0 a_J + sum_j w_j b_j + w_last u            (the newest coefficient of every level)
    uniform:  the `memory_size` coarsest nodes of the tree below a_J[t], level by level

    The tree is linear: it runs once, on an impulse, and the response is the kernel of one convolution.

    Args:
        d_model: channels, each with its own h0, h1 and w.
        l_max: length the tree reaches.
        kernel_size: taps of h0 and of h1.
        depth: J; None for ceil(log2((l_max - 1) / (kernel_size - 1) + 1)).
        tree: "fading" or "uniform".
        memory_size: number of nodes for "uniform".
        options: device and dtype.
    """

    fixed = frozenset(("bidirectional",))

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        kernel_size: int = 2,
        depth: int | None = None,
        tree: str = "fading",
        memory_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_choice("tree", tree, ("fading", "uniform"))
        check_positive_int(kernel_size=kernel_size)
        if kernel_size < 2:
            raise ValueError(f"kernel_size must be at least 2; got {kernel_size!r}")
        if (tree == "uniform") != (memory_size is not None):
            raise ValueError(f"memory_size must be given for tree='uniform' and only then; got {memory_size!r}")
        if depth is None:
            depth = max(1, math.ceil(math.log2((l_max - 1) / (kernel_size - 1) + 1)))
        nodes = depth + 1 if memory_size is None else memory_size
        check_positive_int(depth=depth, memory_size=nodes)
        self.kernel_size, self.depth, self.tree, self.memory_size = kernel_size, depth, tree, memory_size
        h0, h1 = uniform(-1, 1, 2, d_model, kernel_size) / kernel_size**0.5
        self.h0, self.h1 = as_parameter(h0, **self.factory), as_parameter(h1, **self.factory)
        self.w = as_parameter(uniform(-1, 1, d_model, nodes + 1) / (nodes + 1) ** 0.5, **self.factory)

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Convolve with the impulse response of the tree."""
        L = x.shape[-1]
        y = ops.fft_conv(x, self.cached_kernel(0, L, functools.partial(self.impulse_response, L)))
        return F.gelu(y) if gelu else y

    def freeze(self) -> None:
        """Cache the impulse response up to l_max."""
        self.cache_kernel(self.impulse_response(self.l_max), 0)

    def impulse_response(self, length: int) -> Tensor:
        """Return the tree's response to an impulse, (d_model, length)."""
        return self.run_tree(F.pad(torch.ones_like(upcast(self.h0[:, :1])), (0, length - 1)))

    def run_tree(self, x: Tensor) -> Tensor:
        """Evaluate the tree on x (..., d_model, L), level by level."""
        h0, h1, w = upcast(self.h0), upcast(self.h1), upcast(self.w)
        a, details = x, []
        for j in range(self.depth):
            details.append(dilated_conv(a, h1, 2**j))
            a = dilated_conv(a, h0, 2**j)
        y = w[:, -1:] * x + w[:, :1] * a
        # a_J[t] depends on `count` nodes of level j, which lie 2^j apart. Levels go from coarse to fine.
        used, count = 1, 1
        for j in reversed(range(self.depth)):
            if self.memory_size is not None:
                count = min(count, self.memory_size - used)
            if count == 0:
                break
            y = y + dilated_conv(details[j], w[:, used : used + count], 2 ** (j + 1))
            used += count
            if self.tree == "uniform":
                count = 2 * (count - 1) + self.kernel_size
        return y

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        return f"{self.d_model}, l_max={self.l_max}, kernel_size={self.kernel_size}, depth={self.depth}, {self.tree}"


def dilated_conv(x: Tensor, h: Tensor, dilation: int) -> Tensor:
    """Return sum_k h[:, k] x[t - dilation k]: x (..., C, L), h (C, K)."""
    L = x.shape[-1]
    lags = [k * dilation for k in range(h.shape[1]) if k * dilation < L]
    shifted = (F.pad(x[..., : L - lag], (lag, 0)) * h[:, k, None] for k, lag in enumerate(lags))
    return sum(shifted, torch.zeros_like(x))
