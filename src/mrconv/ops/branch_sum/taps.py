"""Branches of a few taps each, as shifts of the input.

One pass over the input gives the statistics of all branches without storing their outputs; then the output is one
convolution with all taps. In the backward pass, one correlation of the output's gradient g with the input gives
sum_t g c_b for all branches. Then every dc_b = s_b g - a_b - q_b c_b is computed, for a slice of the batch at a time,
and gives the gradients of its taps and of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import compute_dtype, constants, with_format_of
from ..tap_conv.shifts import Scratch, add_correlation, add_taps, convolve, correlate, slices


class TapBranches:
    """Branches of taps over u (B, C, L): branch i has the next sizes[i] of the taps, values (C, T) at lags."""

    heights = None

    def __init__(
        self, u: Tensor, values: Tensor, lengths: Tensor | None, lags: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.u, self.lengths, self.lags, self.sizes = u, lengths, lags, sizes
        self.values = values.to(compute_dtype(u, values)).t().contiguous()  # (T, C)

    def moments(self) -> tuple[Tensor, None]:
        """Return partial sums of c_b and of c_b^2, (P, 2, N, C)."""
        u, values, sizes = self.u, self.values, self.sizes
        sums, scratch = values.new_zeros(2, len(sizes), u.shape[1]), Scratch()
        for batch, channels, (x,) in slices(u, values.dtype, u):
            c = scratch.like(x)
            for i, (branch, lags) in enumerate(self._branches(values[:, channels])):
                self._mask(add_taps(c.zero_(), x, branch, lags), batch)
                sums[0, i, channels] += c.sum((0, 2))
                sums[1, i, channels] += c.square_().sum((0, 2))
        return sums[None], None

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, as one convolution."""
        layout = _layout(tuple(self.lags), tuple(self.sizes), skip is not None)
        taps = self.values * _take(scale, layout.owners)
        if skip is not None:
            taps = torch.cat([taps, skip[None].to(taps.dtype)])
        return convolve(self.u, _sum_groups(taps, layout.members), layout.lags, shift.sum(0), triton=False)

    def products(self, grad: Tensor) -> Tensor:
        """Return the sums over batch and time, (1, N + 2, C), of g c_b, of g and of g u."""
        self.grad, layout = grad, _layout(tuple(self.lags), tuple(self.sizes), True)
        products = correlate(grad, self.u, layout.lags, self.values.dtype, triton=False)
        inner = _sum_groups(self.values * _take(products, layout.positions[:-1]), layout.branches)
        g_sum = grad.sum((0, 2), dtype=inner.dtype)
        return torch.cat([inner, g_sum[None], products[layout.positions[-1]][None]])[None]

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the values for dc_b = s_b g - a_b - q_b c_b, a slice at a time."""
        du, dvalues = self._gradients((s, q, a), skip)
        return with_format_of(self.u, du), dvalues.t()

    def _gradients(self, factors: tuple[Tensor, Tensor, Tensor], skip: Tensor | None) -> tuple[Tensor, Tensor]:
        du, dvalues, scratch = torch.empty_like(self.u), torch.zeros_like(self.values), Scratch()
        for batch, channels, (grad, x) in slices(self.u, self.values.dtype, self.grad, self.u):
            total = scratch.like(x, "du").zero_()
            if skip is not None:
                torch.mul(grad, skip[channels, None], out=total)
            branches = zip(
                self._branches(self.values[:, channels]),
                dvalues[:, channels].split(list(self.sizes)),
                *(factor[:, channels, None] for factor in factors),
                strict=True,
            )
            dc, product = scratch.like(x, "dc"), scratch.like(x, "product")
            for (values, lags), out, s, q, a in branches:
                self._mask(add_taps(dc.zero_(), x, values, lags).mul_(-q).addcmul_(grad, s).sub_(a), batch)
                add_taps(total, dc, values, [-lag for lag in lags])
                add_correlation(out, dc, x, lags, product)
            du[batch, channels] = total
        return du, dvalues

    def _branches(self, values: Tensor) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Yield the values and lags of each branch."""
        start = 0
        for branch in values.split(list(self.sizes)):
            yield branch, self.lags[start : start + len(branch)]
            start += len(branch)

    def _mask(self, c: Tensor, batch: slice) -> None:
        """Zero c from the sequences' lengths on, in place."""
        if self.lengths is not None:
            c *= (torch.arange(c.shape[-1], device=c.device) < self.lengths[batch, None])[:, None]


def tap_branches(
    u: Tensor,
    values: Tensor,
    lengths: Tensor | None,
    lags: Sequence[int],
    sizes: Sequence[int],
    triton: bool,
) -> Any:
    """Return the computation in torch or by Triton."""
    if triton:
        from .taps_triton import TritonTapBranches

        return TritonTapBranches(u, values, lengths, lags, sizes)
    return TapBranches(u, values, lengths, lags, sizes)


class _Layout(NamedTuple):
    """Indices that merge the taps of all branches, and the skip at lag 0 as the last tap, into one kernel."""

    lags: tuple[int, ...]  # of the merged kernel, each once
    positions: tuple[int, ...]  # of each tap in the merged kernel
    members: tuple[tuple[int, ...], ...]  # the taps at each lag of the merged kernel
    owners: tuple[int, ...]  # the branch of each tap
    branches: tuple[tuple[int, ...], ...]  # the taps of each branch


@functools.lru_cache(maxsize=256)
def _layout(lags: tuple[int, ...], sizes: tuple[int, ...], skip: bool) -> _Layout:
    every = (*lags, 0) if skip else lags
    union = tuple(sorted(set(every)))
    members: dict[int, list[int]] = {lag: [] for lag in union}
    for j, lag in enumerate(every):
        members[lag].append(j)
    owners = tuple(i for i, n in enumerate(sizes) for _ in range(n))
    branches = tuple(tuple(j for j, owner in enumerate(owners) if owner == i) for i in range(len(sizes)))
    positions = tuple(union.index(lag) for lag in every)
    return _Layout(union, positions, tuple(tuple(members[lag]) for lag in union), owners, branches)


def _take(x: Tensor, index: Sequence[int]) -> Tensor:
    return x.index_select(0, constants(index, x))


def _sum_groups(x: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the sum of x[j] over the j of each group, in a fixed order."""
    width, zero = max(map(len, groups), default=0), len(x)
    index = [j for group in groups for j in (*group, *[zero] * (width - len(group)))]
    return _take(F.pad(x, (0, 0, 0, 1)), index).view(len(groups), width, x.shape[1]).sum(1)
