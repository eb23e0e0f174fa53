"""Which op runs a kernel: taps at consecutive lags go through the FFT, scattered taps as shifts.

A kernel is `values` (C, T) and the `lags` they act at, y[t] = sum_j values[j] u[t - lags[j]]. Lags given as a
`range` are consecutive (a dense kernel); a tuple means a few taps here and there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .fft import fft_conv, fft_conv_reference
from .moments import spectral_moments
from .taps import tap_conv, tap_conv_reference, tap_moments

Lags = range | tuple[int, ...]
Taps = tuple[Tensor, Lags]


def conv(u: Tensor, values: Tensor, lags: Lags) -> Tensor:
    """Depthwise convolution of u (B, C, L) with one kernel, the size of u."""
    if isinstance(lags, range):
        return fft_conv(u, values, lead=-lags.start)
    return tap_conv(u, values, lags)


def conv_reference(u: Tensor, values: Tensor, lags: Lags) -> Tensor:
    """Compute `conv` for a causal kernel by plain differentiable torch."""
    if isinstance(lags, range):
        return fft_conv_reference(u, F.pad(values, (lags.start, 0)))
    return tap_conv_reference(u, values, lags)


def moments(u: Tensor, branches: Sequence[Taps]) -> Tensor:
    """Sum and sum of squares over (B, L) of each causal branch's output, (2, N, C).

    Dense branches must share their first lag.
    """
    first = branches[0][1]
    if isinstance(first, range):
        return spectral_moments(u, [values for values, _ in branches], delay=first.start)
    values = torch.cat([values for values, _ in branches], 1)
    return tap_moments(u, values, [p for _, lags in branches for p in lags], [len(b[1]) for b in branches])


def merge(branches: Sequence[Taps], ahead: int, behind: int) -> Taps:
    """Add up kernels into one: at lags -ahead .. behind - 1 if they are dense, else at the lags they have."""
    dense = [(values, lags) for values, lags in branches if isinstance(lags, range)]
    if len(dense) == len(branches):
        total = dense[0][0].new_zeros(dense[0][0].shape[0], ahead + behind)
        for values, lags in dense:
            if lags.step < 0:
                values, lags = values.flip(1), lags[::-1]
            total = total + F.pad(values, (ahead + lags.start, behind - lags.start - len(lags)))
        return total, range(-ahead, behind)
    values = torch.cat([values for values, _ in branches], 1)
    every = [lag for _, lags in branches for lag in lags]
    union = tuple(sorted(set(every)))
    place = {lag: j for j, lag in enumerate(union)}
    index = torch.tensor([place[lag] for lag in every], device=values.device)
    return values.new_zeros(values.shape[0], len(union)).index_add(1, index, values), union


def densify(values: Tensor, lags: Lags, ahead: int, behind: int) -> Tensor:
    """Return the kernel (C, ahead + behind) at all lags -ahead .. behind - 1."""
    if isinstance(lags, range):
        return values
    index = torch.tensor(lags, device=values.device) + ahead
    return values.new_zeros(values.shape[0], ahead + behind).index_add(1, index, values)
