"""Triton kernels of `moving_sum_conv`.

From one position to the next, the output changes by e[t] = sum_i h_i (u[t] - u[t - W_i]). A chunk of BL positions is
therefore the value before it, from sums of earlier chunks, plus the cumulative sum of e. Nothing large cancels, so
float32 is accurate for sequences of any length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import compute_dtype, constants
from .._triton import gelu as gelu_of
from .._triton import int32_constants, narrow, offsets, tiles, wide

CHUNK, CHANNELS, WARPS = 128, 32, 4  # the fastest of those tried on an H200; unrolled over branches, registers spill
BLOCK = 32  # chunk totals that a program reads at a time


@triton.jit
def _to(x, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast x to WIDE; half precision is cast to float32 first, as Triton's interpreter requires."""
    return x.to(tl.float32).to(WIDE) if x.dtype != tl.float64 else x


@triton.jit
def _totals_kernel(  # type: ignore[no-untyped-def]
    u, out, C, L, u_b, u_c, u_l, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr
):
    """out[b, k, c] = sum over the k-th chunk."""
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    x = tl.load(u + b * u_b + offsets(t, c, u_l, u_c), (t < L)[:, None] & (c < C)[None, :], 0.0)
    tl.store(out + (b * tl.num_programs(0) + tl.program_id(0)) * C + c, tl.sum(_to(x, WIDE), 0), c < C)


@triton.jit
def _output_kernel(  # type: ignore[no-untyped-def]
    u, totals, values, factors, widths, skip, bias, y, C, L, N, v_i, v_c, u_b, u_c, u_l, y_b, y_c, y_l,
    SKIP: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    k, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.arange(0, BL)
    t = k * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    real = (c < C)[None, :]
    at = u + b * u_b + offsets(t, c, u_l, u_c)
    x = _to(tl.load(at, (t < L)[:, None] & real, 0.0), WIDE)
    change = tl.zeros([BL, BC], WIDE)
    edge = tl.zeros([BL, BC], WIDE)  # what the last chunks of the windows before t0 contribute, by position in them
    near = tl.zeros([BL, BC], WIDE)  # weights of the positions of chunk k - 1
    slope = tl.zeros([BC], WIDE)
    most = 0
    for i in range(N):
        w = tl.load(widths + i)
        h = _to(tl.load(values + i * v_i + c * v_c, c < C, 0.0), WIDE) * tl.load(factors + i).to(WIDE)
        slope += h
        before = tl.load(at - w.to(tl.int64) * u_l, (t >= w)[:, None] & (t < L + w)[:, None] & real, 0.0)
        change -= h[None, :] * _to(before, WIDE)
        n, r = w // BL, w % BL
        most = tl.maximum(most, n)
        if n == 0:
            near += tl.where((j >= BL - r)[:, None], h[None, :], 0.0)
        elif r > 0:
            s = t - (n + 1) * BL
            inside = ((s >= 0) & (j >= BL - r))[:, None] & real
            far = tl.load(at - ((n + 1) * BL).to(tl.int64) * u_l, inside, 0.0)
            edge += h[None, :] * _to(far, WIDE)
    if k > 0:
        edge += near * _to(tl.load(at - BL * u_l, real, 0.0), WIDE)
    start = tl.sum(edge, 0)
    # whole chunks within a window: chunk k - d counts for every window of at least d chunks
    for first in range(1, tl.minimum(most, k) + 1, BK):
        d = first + tl.arange(0, BK)
        weight = tl.zeros([BK, BC], WIDE)
        for i in range(N):
            n = tl.load(widths + i) // BL
            h = _to(tl.load(values + i * v_i + c * v_c, c < C, 0.0), WIDE) * tl.load(factors + i).to(WIDE)
            weight += tl.where((d <= n)[:, None], h[None, :], 0.0)
        inside = (d <= k)[:, None] & real
        sums = tl.load(totals + (b * chunks + k - d)[:, None] * C + c[None, :], inside, 0.0)
        start += tl.sum(weight * sums, 0)
    total = tl.cumsum(change + slope[None, :] * x, 0) + (start + _to(tl.load(bias + c, c < C, 0.0), WIDE))[None, :]
    if SKIP:
        total += _to(tl.load(skip + c, c < C, 0.0), WIDE)[None, :] * x
    if GELU:
        total = gelu_of(total)
    tl.store(y + b * y_b + offsets(t, c, y_l, y_c), narrow(total, y), (t < L)[:, None] & real)


def conv(
    u: Tensor, values: Tensor, factors: Sequence[float], widths: Sequence[int], skip: Tensor | None, bias: Tensor,
    gelu: bool,
) -> Tensor:  # fmt: skip
    """Compute `moving_sum_conv`."""
    (_, C, L), dtype, y = u.shape, compute_dtype(u, values), torch.empty_like(u)
    if not u.numel():
        return y
    grid = tiles(u, CHUNK, CHANNELS)
    totals = u.new_empty(grid[2], grid[0], C, dtype=dtype)
    options = {"WIDE": wide(dtype), "BL": CHUNK, "BC": CHANNELS}
    _totals_kernel[grid](u, totals, C, L, *u.stride(), **options, num_warps=WARPS)
    _output_kernel[grid](
        u, totals, values, constants(factors, u, torch.float64), int32_constants(widths, u),
        bias if skip is None else skip, bias, y, C, L, len(widths), values.stride(0), values.stride(1),
        *u.stride(), *y.stride(), SKIP=skip is not None, GELU=gelu, **options, BK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return y
