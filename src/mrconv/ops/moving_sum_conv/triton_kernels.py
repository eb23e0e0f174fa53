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
from .._triton import narrow, offsets, tiles, wide

CHUNK, CHANNELS, WARPS, TOTALS_WARPS = 64, 32, 4, 2
BLOCK = 64  # chunk totals that a program reads at a time


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
def _height(values, factors, i, v_i, v_c, c, C, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    return _to(tl.load(values + i * v_i + c * v_c, c < C, 0.0), WIDE) * tl.load(factors + i).to(WIDE)


@triton.jit
def _output_kernel(  # type: ignore[no-untyped-def]
    u, totals, values, factors, skip, bias, y, C, L, v_i, v_c, u_b, u_c, u_l, y_b, y_c, y_l,
    WIDTHS: tl.constexpr, N: tl.constexpr, MOST: tl.constexpr, SKIP: tl.constexpr, GELU: tl.constexpr,
    WIDE: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a chunk of the output; WIDTHS are constants, so that all loads are issued at once."""
    k, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.arange(0, BL)
    t = k * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    real = (c < C)[None, :]
    at = u + b * u_b + offsets(t, c, u_l, u_c)
    x = _to(tl.load(at, (t < L)[:, None] & real, 0.0), WIDE)
    last = _to(tl.load(at - BL * u_l, (t >= BL)[:, None] & real, 0.0), WIDE)  # chunk k - 1
    change, edge, near = tl.zeros([BL, BC], WIDE), tl.zeros([BL, BC], WIDE), tl.zeros([BL, BC], WIDE)
    slope = tl.zeros([BC], WIDE)
    for i in tl.static_range(N):
        h = _height(values, factors, i, v_i, v_c, c, C, WIDE)
        slope += h
        inside = ((t >= WIDTHS[i]) & (t < L + WIDTHS[i]))[:, None] & real
        before = tl.load(at - tl.full([], WIDTHS[i], tl.int64) * u_l, inside, 0.0)
        change -= h[None, :] * _to(before, WIDE)
        if WIDTHS[i] < BL:  # the window before the chunk: its part in chunk k - 1
            near += tl.where((j >= BL - WIDTHS[i])[:, None], h[None, :], 0.0)
        elif WIDTHS[i] % BL != 0:  # its part in an earlier chunk that it covers only partly
            inside = ((t >= (WIDTHS[i] // BL + 1) * BL) & (j >= BL - WIDTHS[i] % BL))[:, None] & real
            far = tl.load(at - tl.full([], (WIDTHS[i] // BL + 1) * BL, tl.int64) * u_l, inside, 0.0)
            edge += h[None, :] * _to(far, WIDE)
    start = tl.sum(edge + near * last, 0)
    for first in range(1, tl.minimum(MOST, k) + 1, BK):  # whole chunks k - d
        d = first + tl.arange(0, BK)
        weight = tl.zeros([BK, BC], WIDE)
        for i in tl.static_range(N):
            if WIDTHS[i] >= BL:
                h = _height(values, factors, i, v_i, v_c, c, C, WIDE)
                weight += tl.where((d <= WIDTHS[i] // BL)[:, None], h[None, :], 0.0)
        sums = tl.load(totals + (b * chunks + k - d)[:, None] * C + c[None, :], (d <= k)[:, None] & real, 0.0)
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
    grid, most = tiles(u, CHUNK, CHANNELS), max(widths) // CHUNK
    totals = u.new_empty(grid[2], grid[0], C, dtype=dtype)
    options = {"WIDE": wide(dtype), "BL": CHUNK, "BC": CHANNELS}
    _totals_kernel[grid](u, totals, C, L, *u.stride(), **options, num_warps=TOTALS_WARPS)
    _output_kernel[grid](
        u, totals, values, constants(factors, u, torch.float64), bias if skip is None else skip, bias, y, C, L,
        values.stride(0), values.stride(1), *u.stride(), *y.stride(), WIDTHS=tuple(widths), N=len(widths), MOST=most,
        SKIP=skip is not None, GELU=gelu, BK=min(BLOCK, triton.next_power_of_2(max(most, 1))), **options,
        num_warps=WARPS,
    )  # fmt: skip
    return y
