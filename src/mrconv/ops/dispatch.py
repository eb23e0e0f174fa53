"""Which op runs a kernel: taps at consecutive lags go through the FFT, scattered taps as shifts.

A kernel is `values` (C, T) and the `lags` they act at, y[t] = sum_j values[j] u[t - lags[j]]. Lags given as a
`range` are consecutive (a dense kernel); a tuple means a few taps here and there. Values (C, 1) at several consecutive
lags are a constant kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import use_triton
from .constants import integers_on
from .fft import fft_conv, fft_conv_reference
from .normalised import spectral_branch_sum
from .taps import tap_branch_sum, tap_conv, tap_conv_reference
from .windows import window_branch_sum

Lags = range | tuple[int, ...]
Taps = tuple[Tensor, Lags]


def conv(u: Tensor, values: Tensor, lags: Lags, backend: str = "auto") -> Tensor:
    """Depthwise convolution of u (B, C, L) with one kernel, the size of u."""
    if isinstance(lags, range):
        return fft_conv(u, *_around_zero(values, lags), backend=backend)
    return tap_conv(u, values, lags, backend)


def conv_reference(u: Tensor, values: Tensor, lags: Lags) -> Tensor:
    """Compute `conv` by plain differentiable torch."""
    if isinstance(lags, range):
        return fft_conv_reference(u, *_around_zero(values, lags))
    return tap_conv_reference(u, values, lags)


def _around_zero(values: Tensor, lags: range) -> tuple[Tensor, int]:
    """Return a dense kernel in ascending order of lags, padded to reach lag 0, and how far it looks ahead."""
    values, lags = _ascending(values, lags)
    return F.pad(values, (max(lags.start, 0), max(1 - lags.stop, 0))), max(-lags.start, 0)


def _ascending(values: Tensor, lags: range) -> tuple[Tensor, range]:
    """Return a dense kernel with every value written out, in ascending order of lags."""
    values = values.expand(-1, len(lags))
    return (values.flip(1), lags[::-1]) if lags.step < 0 else (values, lags)


def branch_sum(
    u: Tensor,
    branches: Sequence[Taps],
    weight: Tensor,
    skip: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, mean, var, count): branches normalised by their batch statistics, weighted, added up, plus skip * u.

    u (B, C, L) is zero from `lengths` (B,) on, where y means nothing. weight is (number of branches, C), skip (C,).
    Dense branches start at lag 0 or, descending, at -1, those that descend last. mean and var (biased) are each
    branch's, over `count` elements of all processes if `sync`, and carry no gradient.
    """
    if isinstance(branches[0][1], range):
        if _windows(u, branches, backend):
            heights = torch.cat([values for values, _ in branches], 1).t().contiguous()
            widths = [len(at) for _, at in branches]
            return window_branch_sum(u, heights, widths, weight, skip, lengths, eps, sync)
        kernels = [(values.expand(-1, len(at)), at) for values, at in branches]
        forward = [values for values, at in kernels if isinstance(at, range) and at.step > 0]
        backward = [values for values, _ in kernels[len(forward) :]]
        return spectral_branch_sum(u, forward, backward, weight, skip, lengths, eps, sync, backend)
    values, lags = torch.cat([values for values, _ in branches], 1), [lag for _, at in branches for lag in at]
    sizes = [len(at) for _, at in branches]
    return tap_branch_sum(u, values, lags, sizes, weight, skip, lengths, eps, sync, backend)


def _windows(u: Tensor, branches: Sequence[Taps], backend: str) -> bool:
    """Tell whether moving sums will do: causal, constant kernels, and Triton to run them."""
    constant = all(isinstance(at, range) and at.step > 0 and values.shape[1] == 1 for values, at in branches)
    return constant and use_triton(u, backend)


def branch_sum_reference(
    u: Tensor,
    branches: Sequence[Taps],
    weight: Tensor,
    skip: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `branch_sum` with all branches' outputs, by plain differentiable torch."""
    c = torch.stack([conv_reference(u, *branch) for branch in branches])  # (nb, B, C, L)
    ends = torch.full(u.shape[:1], u.shape[2], device=u.device) if lengths is None else lengths
    mask = (torch.arange(u.shape[2], device=u.device) < ends[:, None])[:, None].to(u.dtype)
    count = mask.sum()
    mean = (c * mask).sum((1, 3)) / count
    centred = c - mean[:, None, :, None]
    var = (centred.square() * mask).sum((1, 3)) / count
    y = (weight * torch.rsqrt(var + eps))[:, None, :, None] * centred
    return y.sum(0) + (0 if skip is None else skip[:, None] * u), mean, var, count


def merge(branches: Sequence[Taps], ahead: int, behind: int) -> Taps:
    """Add up kernels into one: at lags -ahead .. behind - 1 if they are dense, else at the lags they have."""
    dense = [(values, lags) for values, lags in branches if isinstance(lags, range)]
    if len(dense) == len(branches):
        total = dense[0][0].new_zeros(dense[0][0].shape[0], ahead + behind)
        for values, lags in itertools.starmap(_ascending, dense):
            total = total + F.pad(values, (ahead + lags.start, behind - lags.start - len(lags)))
        return total, range(-ahead, behind)
    values = torch.cat([values for values, _ in branches], 1)
    every = [lag for _, lags in branches for lag in lags]
    union = tuple(sorted(set(every)))
    place = {lag: j for j, lag in enumerate(union)}
    index = integers_on([place[lag] for lag in every], values)
    return values.new_zeros(values.shape[0], len(union)).index_add(1, index, values), union


def densify(values: Tensor, lags: Lags, ahead: int, behind: int) -> Tensor:
    """Return the kernel (C, ahead + behind) at all lags -ahead .. behind - 1."""
    if isinstance(lags, range):
        return values
    index = integers_on([lag + ahead for lag in lags], values)
    return values.new_zeros(values.shape[0], ahead + behind).index_add(1, index, values)
