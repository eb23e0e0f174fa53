"""Kernels as taps at lags: dense forms and the sum of several kernels as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common import Lags, Taps, constants


def add_kernels(kernels: Sequence[Taps], ahead: int, behind: int) -> Taps:
    """Return the sum of kernels: at lags -ahead .. behind - 1 if all are dense, else at the union of their lags."""
    dense = [_ascending(values, lags) for values, lags in kernels if isinstance(lags, range)]
    if len(dense) == len(kernels):
        return Taps(_add_dense(dense, range(-ahead, behind)), range(-ahead, behind))
    values = torch.cat([kernel.values for kernel in kernels], 1)
    lags = [lag for kernel in kernels for lag in kernel.lags]
    union = tuple(sorted(set(lags)))
    position = {lag: j for j, lag in enumerate(union)}
    index = constants([position[lag] for lag in lags], values)
    return Taps(values.new_zeros(values.shape[0], len(union)).index_add(1, index, values), union)


def _add_dense(kernels: Sequence[tuple[Tensor, range]], lags: range) -> Tensor:
    """Add kernels of ascending lags, segment by segment between the lags where a kernel starts or ends."""
    bounds = sorted({lags.start, lags.stop, *(bound for _, at in kernels for bound in (at.start, at.stop))})
    segments: dict[int, list[Tensor]] = {start: [] for start in bounds[:-1]}
    for values, at in kernels:
        inside = [bound for bound in bounds if at.start <= bound <= at.stop]
        sizes = [stop - start for start, stop in itertools.pairwise(inside)]
        for start, segment in zip(inside, values.split(sizes, 1), strict=False):
            segments[start].append(segment)
    sums = []
    for start, stop in itertools.pairwise(bounds):
        parts = segments[start] or [kernels[0][0].new_zeros(len(kernels[0][0]), stop - start)]
        sums.append(sum(parts[1:], parts[0]))
    return torch.cat(sums, 1)


def densify(values: Tensor, lags: Lags, ahead: int, behind: int) -> Tensor:
    """Return scattered taps as a kernel (C, ahead + behind) at lags -ahead .. behind - 1; dense values unchanged."""
    if isinstance(lags, range):
        return values
    index = constants([lag + ahead for lag in lags], values)
    return values.new_zeros(values.shape[0], ahead + behind).index_add_(1, index, values)


def dense_taps(values: Tensor, lags: Lags) -> tuple[Tensor, range]:
    """Return scattered taps as a dense kernel that includes lag 0; a dense kernel unchanged."""
    if isinstance(lags, range):
        return values, lags
    ahead, behind = max(0, -min(lags)), 1 + max(0, *lags)
    return densify(values, lags, ahead, behind), range(-ahead, behind)


def around_zero(values: Tensor, lags: range) -> tuple[Tensor, int]:
    """Return a dense kernel in ascending order of lags, padded to include lag 0, and the number of negative lags."""
    values, lags = _ascending(values, lags)
    missing = max(lags.start, 0), max(1 - lags.stop, 0)
    return F.pad(values, missing) if any(missing) else values, max(-lags.start, 0)


def _ascending(values: Tensor, lags: range) -> tuple[Tensor, range]:
    """Return a dense kernel with one value for each lag, in ascending order of lags."""
    values = values.expand(-1, len(lags))
    return (values.flip(1), lags[::-1]) if lags.step < 0 else (values, lags)
