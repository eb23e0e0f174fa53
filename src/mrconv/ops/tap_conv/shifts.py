"""Convolution and correlation with taps at given lags, as shifts of the input; in torch, or by Triton.

In torch the input is processed in slices that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import with_format_of

SLICE = 2**19  # elements of the input at a time: a few tensors of this size fit into cache


class Scratch:
    """Tensors that are reused from slice to slice: allocating them can cost more than filling them."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def like(self, x: Tensor, name: str = "") -> Tensor:
        """Return an uninitialised tensor like x."""
        if name not in self._tensors or self._tensors[name].shape != x.shape:
            self._tensors[name] = torch.empty_like(x)
        return self._tensors[name]


def slices(u: Tensor, dtype: torch.dtype, *tensors: Tensor) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Yield slices of batch and channels, and these parts of the tensors in a dtype and in u's memory format."""
    B, C, L = u.shape
    channels = min(C, max(1, SLICE // L))
    batch = max(1, SLICE // (L * channels))
    for start in range(0, B, batch):
        for first in range(0, C, channels):
            at = slice(start, start + batch), slice(first, first + channels)
            yield *at, [with_format_of(u[at], x[at].to(dtype)) for x in tensors]


def _overlap(u: Tensor, y: Tensor, lag: int) -> tuple[Tensor, Tensor]:
    """Return the parts of u and y where y[t] depends on u[t - lag]."""
    L = u.shape[-1]
    if lag >= 0:
        return u[..., : max(L - lag, 0)], y[..., lag:]
    return u[..., -lag:], y[..., : max(L + lag, 0)]


def add_taps(y: Tensor, u: Tensor, values: Tensor, lags: Sequence[int]) -> Tensor:
    """Add the convolution of u with values (T, C) to y."""
    for value, lag in zip(values.unbind(0), lags, strict=True):
        source, target = _overlap(u, y, lag)
        target.addcmul_(source, value[:, None])
    return y


def add_correlation(out: Tensor, g: Tensor, u: Tensor, lags: Sequence[int], product: Tensor) -> None:
    """Add sum g[t] u[t - lag] over batch and time to out (T, C) for each lag; overwrites product."""
    for total, lag in zip(out.unbind(0), lags, strict=True):
        source, target = _overlap(u, g, lag)
        total += torch.mul(source, target, out=_overlap(u, product, lag)[1]).sum((0, 2))


def convolve(
    u: Tensor, values: Tensor, lags: Sequence[int], shift: Tensor | None, triton: bool, gelu: bool = False
) -> Tensor:
    """Return the convolution of u with values (T, C), plus shift (C,), with GELU if `gelu`, like u."""
    y = torch.empty_like(u)
    if triton:
        from . import triton_kernels

        return triton_kernels.convolve(u, values, lags, y, shift=shift, gelu=gelu)
    start = values.new_zeros(u.shape[1]) if shift is None else shift
    for batch, channels, (x,) in slices(u, values.dtype, u):
        part = torch.empty_like(x).copy_(start[channels, None])
        part = add_taps(part, x, values[:, channels], lags)
        y[batch, channels] = F.gelu(part) if gelu else part
    return y


def correlate(g: Tensor, u: Tensor, lags: Sequence[int], dtype: torch.dtype, triton: bool) -> Tensor:
    """Return (T, C): the sum of g[t] u[t - lag] over batch and time for each lag."""
    if triton:
        from . import correlation_triton

        return correlation_triton.correlate(g, u, lags, dtype)
    out = torch.zeros(len(lags), u.shape[1], dtype=dtype, device=u.device)
    scratch = Scratch()
    for _, channels, (grad, x) in slices(u, dtype, g, u):
        add_correlation(out[:, channels], grad, x, lags, scratch.like(x))
    return out
