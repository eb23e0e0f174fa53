"""MultiresConv, of MultiresNet: one pair of filters at all dilations (Shi et al., 2023, "Sequence Modeling...")."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from .._utils.checks import check_choice, check_positive_int
from ..mixers import Mixer
from .long_convolution import KeptKernel, parameter, wide


class MultiresConv(KeptKernel, Mixer):
    """A causal wavelet tree of shared filters h0, h1, and a weighted sum of its coefficients.

    a_0 = u;  a_{j+1}[t] = sum_k h0[k] a_j[t - 2^j k],  b_{j+1}[t] = sum_k h1[k] a_j[t - 2^j k],  j < J

    fading:   y = w_0 a_J + sum_j w_j b_j + w_last u            (the newest coefficient of every level)
    uniform:  the `memory_size` coarsest nodes of the tree below a_J[t], all of a level before the next finer one

    All of it is linear, so the tree is run once, on an impulse, and what comes out is the kernel of one convolution.

    Args:
        d_model: channels, each with its own h0, h1 and w.
        l_max: length the tree reaches.
        kernel_size: taps of h0 and of h1.
        depth: J; None takes ceil(log2((l_max - 1) / (kernel_size - 1) + 1)).
        tree: "fading" or "uniform".
        memory_size: nodes that "uniform" keeps.
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        kernel_size: int = 2,
        depth: int | None = None,
        tree: str = "fading",
        memory_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, l_max)
        check_choice("tree", tree, ("fading", "uniform"))
        check_positive_int(kernel_size=kernel_size)
        if kernel_size < 2:
            raise ValueError(f"kernel_size must be at least 2; got {kernel_size!r}")
        if (tree == "uniform") != (memory_size is not None):
            raise ValueError(f"memory_size goes with tree='uniform', and only with it; got {memory_size!r}")
        if depth is None:
            depth = max(1, math.ceil(math.log2((l_max - 1) / (kernel_size - 1) + 1)))
        nodes = depth + 1 if memory_size is None else memory_size
        check_positive_int(depth=depth, memory_size=nodes)
        self.kernel_size, self.depth, self.tree, self.memory_size = kernel_size, depth, tree, memory_size
        taps = torch.empty(2, d_model, kernel_size, dtype=torch.float64, device="cpu").uniform_(-1, 1)
        weights = torch.empty(d_model, nodes + 1, dtype=torch.float64, device="cpu").uniform_(-1, 1)
        self.h0 = parameter(taps[0] / kernel_size**0.5, device, dtype)
        self.h1 = parameter(taps[1] / kernel_size**0.5, device, dtype)
        self.w = parameter(weights / (nodes + 1) ** 0.5, device, dtype)

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Convolve with the tree's answer to an impulse."""
        L = x.shape[-1]
        y = ops.fft_conv(x, self.kernel_for(0, L, functools.partial(self.response, L)))
        return F.gelu(y) if gelu else y

    def freeze(self) -> None:
        """Keep the tree's answer up to l_max."""
        self.keep(self.response(self.l_max), 0)

    def response(self, length: int) -> Tensor:
        """Return the tree's answer to an impulse, (d_model, length)."""
        return self.run_tree(F.pad(torch.ones_like(wide(self.h0[:, :1])), (0, length - 1)))

    def run_tree(self, x: Tensor) -> Tensor:
        """Run the tree as it is written, on x (..., d_model, L)."""
        h0, h1, w = wide(self.h0), wide(self.h1), wide(self.w)
        a, details = x, []
        for j in range(self.depth):
            details.append(dilated(a, h1, 2**j))
            a = dilated(a, h0, 2**j)
        y = w[:, -1:] * x + w[:, :1] * a
        # The nodes of level j that a_J[t] is made of lie 2^j apart, `count` of them; the levels from the coarsest on.
        used, count = 1, 1
        for j in reversed(range(self.depth)):
            if self.memory_size is not None:
                count = min(count, self.memory_size - used)
            if count == 0:
                break
            y = y + dilated(details[j], w[:, used : used + count], 2 ** (j + 1))
            used += count
            if self.tree == "uniform":
                count = 2 * (count - 1) + self.kernel_size
        return y

    def extra_repr(self) -> str:
        """Return what `print` shows of the mixer."""
        return f"{self.d_model}, l_max={self.l_max}, kernel_size={self.kernel_size}, depth={self.depth}, {self.tree}"


def dilated(x: Tensor, h: Tensor, dilation: int) -> Tensor:
    """Return sum_k h[:, k] x[t - dilation k]: x (..., C, L), h (C, K)."""
    L = x.shape[-1]
    lags = [k * dilation for k in range(h.shape[1]) if k * dilation < L]
    shifted = (F.pad(x[..., : L - lag], (lag, 0)) * h[:, k, None] for k, lag in enumerate(lags))
    return sum(shifted, torch.zeros_like(x))
