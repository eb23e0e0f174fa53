"""The Triton kernels behind `windows.py` for kernels of a few modes. A program does a tile of ROWS positions.

A branch's kernel is a sum of waves e^{i w tau} over lags 0 .. W - 1. In the tile that starts at t0, with j = t - t0,

    Z[t]  =  sum_{s = t-W+1 .. t} x[s] e^{i w (t-s)}
          =  e^{i w j} (carry + sum_{i <= j} (x[t0+i] - f x[t0+i-W]) e^{-i w i})

where f = e^{i w W}, and carry = e^{i w} Z[t0 - 1] has been put together from sums of x[s] e^{-i w i} over whole tiles.
The real and imaginary parts of Z are the basis functions (1 for w = 0, else 2) that a branch's coefficients weight.
All phases count from a tile's start, and what enters a carry leaves it again bit by bit, so that nothing drifts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

import triton

from .triton_tools import tiles

ROWS, COLUMNS, WARPS = 32, 32, 1  # of a tile: positions, channels; a channel a thread makes running sums cheapest
STEPS = 8  # tiles whose carries are found at a time


@triton.jit
def _at(x, t, j, c, x_l, x_c):  # type: ignore[no-untyped-def]
    """Return pointers to positions t + j and channels c: 64 bits up to a tile's first row, 32 within."""
    first = x + tl.full([], t, tl.int64) * x_l + c.to(tl.int64) * x_c
    return first[None, :] + (j * x_l)[:, None]


@triton.jit
def _load(x, t, j, c, x_l, x_c, C, L, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x at positions t + j and channels c, zero outside of it."""
    inside = (t + j).to(tl.uint32) < L.to(tl.uint32)
    return tl.load(_at(x, t, j, c, x_l, x_c), inside[:, None] & (c < C)[None, :], 0.0).to(WIDE)


@triton.jit
def _sum_from(start, x, j, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the running sum over rows, beginning with `start` before row 0; j counts the rows, down if BACK."""
    return tl.cumsum(tl.where((j == 0)[:, None], x + start[None, :], x), 0, reverse=BACK)


@triton.jit
def _turn(x, y, cos, sin):  # type: ignore[no-untyped-def]
    """Multiply x + iy by cos + i sin."""
    return x * cos - y * sin, x * sin + y * cos


@triton.jit
def _turned(d, before, rows, edges, j, m: tl.constexpr, CUT: tl.constexpr, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the real part and less the imaginary part of (x - f before) e^{-i w j}, for d = x - before."""
    cos = tl.load(rows + 2 * m * BL + j)[:, None]
    sin = tl.load(rows + (2 * m + 1) * BL + j)[:, None]
    if CUT:
        d += before * tl.load(edges + 2 * m)
        across = before * tl.load(edges + 2 * m + 1)
        return d * cos - across * sin, d * sin + across * cos
    return d * cos, d * sin


@triton.jit
def _wave(  # type: ignore[no-untyped-def]
    d, before, even, odd, rows, edges, j, m: tl.constexpr, CUT: tl.constexpr, BACK: tl.constexpr, BL: tl.constexpr
):
    """Return the real and imaginary part of Z for mode m > 0, given its carry; d is x less `before`, what left."""
    x, y = _turned(d, before, rows, edges, j, m, CUT, BL)
    even = _sum_from(even, x, j, BACK)
    odd = _sum_from(-odd, y, j, BACK)
    cos = tl.load(rows + 2 * m * BL + j)[:, None]
    sin = tl.load(rows + (2 * m + 1) * BL + j)[:, None]
    return even * cos + odd * sin, even * sin - odd * cos


@triton.jit
def _branch(  # type: ignore[no-untyped-def]
    d, before, factors, carry, rows, edges, j, c, C,
    M: tl.constexpr, CUT: tl.constexpr, BACK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Return a branch's output in this tile."""
    y = _sum_from(tl.load(carry + c, c < C, 0.0), d, j, BACK) * tl.load(factors + c, c < C, 0.0)[None, :]
    for m in tl.static_range(1, M):
        even = tl.load(carry + (2 * m - 1) * C + c, c < C, 0.0)
        odd = tl.load(carry + 2 * m * C + c, c < C, 0.0)
        even, odd = _wave(d, before, even, odd, rows, edges, j, m, CUT, BACK, BL)
        y += even * tl.load(factors + (2 * m - 1) * C + c, c < C, 0.0)[None, :]
        y += odd * tl.load(factors + 2 * m * C + c, c < C, 0.0)[None, :]
    return y


@triton.jit
def _branch_from(  # type: ignore[no-untyped-def]
    d, before, gap, gap_before, r, factors, carry, rows, edges, j, c, C,
    M: tl.constexpr, CUT: tl.constexpr, BACK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Return a branch's output in rows that begin r < BL after the tile whose carry it is; gap is d of those r rows."""
    start = tl.load(carry + c, c < C, 0.0) + tl.sum(gap, 0)
    y = _sum_from(start, d, j, BACK) * tl.load(factors + c, c < C, 0.0)[None, :]
    for m in tl.static_range(1, M):
        even = tl.load(carry + (2 * m - 1) * C + c, c < C, 0.0)
        odd = tl.load(carry + 2 * m * C + c, c < C, 0.0)
        x, z = _turned(gap, gap_before, rows, edges, j, m, CUT, BL)
        even, odd = _turn(
            even + tl.sum(x, 0),
            odd - tl.sum(z, 0),
            tl.load(rows + 2 * m * BL + r),
            tl.load(rows + (2 * m + 1) * BL + r),
        )
        even, odd = _wave(d, before, even, odd, rows, edges, j, m, CUT, BACK, BL)
        y += even * tl.load(factors + (2 * m - 1) * C + c, c < C, 0.0)[None, :]
        y += odd * tl.load(factors + 2 * m * C + c, c < C, 0.0)[None, :]
    return y


@triton.jit
def _store_sums(x, rows, out, j, c, C, M: tl.constexpr, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums over rows of x times the table's e^{-i w j}."""
    tl.store(out + c, tl.sum(x * tl.load(rows + j)[:, None], 0), c < C)
    for m in tl.static_range(1, M):
        even = tl.sum(x * tl.load(rows + 2 * m * BL + j)[:, None], 0)
        odd = tl.sum(x * tl.load(rows + (2 * m + 1) * BL + j)[:, None], 0)
        tl.store(out + (2 * m - 1) * C + c, even, c < C)
        tl.store(out + 2 * m * C + c, -odd, c < C)


@triton.jit(do_not_specialize=["x", "L", "x_b", "part"])
def _sums_kernel(  # type: ignore[no-untyped-def]
    x, shapes, rows, out, C, L, N, x_b, x_c, x_l, part,
    M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    v = _load(x + b * x_b, tl.program_id(0) * BL, j, c, x_l, x_c, C, L, WIDE)
    here = out + (b * tl.num_programs(0) + tl.program_id(0)) * N * (2 * M - 1) * C
    for i in range(N):
        _store_sums(v, rows + (6 * i + 2) * M * BL, here, j, c, C, M, BL)
        if tl.load(shapes + 3 * i + 2) != 0:
            _store_sums(v, rows + (6 * i + 4) * M * BL, here + part, j, c, C, M, BL)
        here += (2 * M - 1) * C


@triton.jit
def _pair(sums, k, c, C, T, m, row):  # type: ignore[no-untyped-def]
    """Return mode m's sums of tiles k as a complex pair, zero outside of 0 .. T - 1."""
    inside = ((k >= 0) & (k < T))[:, None]
    at = sums + k.to(tl.int64)[:, None] * row + c[None, :]
    even = tl.load(at + tl.maximum(2 * m - 1, 0) * C, inside & (c < C)[None, :], 0.0).to(tl.float64)
    odd = tl.load(at + 2 * m * C, inside & (c < C * tl.minimum(m, 1))[None, :], 0.0).to(tl.float64)
    return even, odd


@triton.jit(do_not_specialize=["sums", "carries", "C", "T", "N", "part"])
def _carries_kernel(  # type: ignore[no-untyped-def]
    sums, carries, shapes, steps, C, T, N, part, M: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr
):
    i = tl.program_id(0) // M
    m = tl.program_id(0) % M
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = (N * (2 * M - 1) * C).to(tl.int64)
    first = tl.program_id(2).to(tl.int64) * T * row + i * (2 * M - 1) * C
    reach = tl.load(shapes + 3 * i + 1)
    parted = T * tl.load(shapes + 3 * i + 2)  # tiles that have sums of their early rows
    turns = steps + tl.program_id(0) * 2 * (BK + 2)  # by 0 .. BK tiles, and by the window's whole tiles
    j = tl.arange(0, BK)
    cos = tl.load(turns + j)[:, None]
    sin = tl.load(turns + BK + 2 + j)[:, None]
    one_cos = tl.load(turns + 1)
    one_sin = tl.load(turns + BK + 3)
    all_cos = tl.load(turns + BK)
    all_sin = tl.load(turns + 2 * BK + 2)
    reach_cos = tl.load(turns + BK + 1)
    reach_sin = tl.load(turns + 2 * BK + 3)
    out_even = carries + first + tl.maximum(2 * m - 1, 0) * C
    out_odd = carries + first + 2 * m * C
    tl.store(out_even + c, tl.zeros([BC], carries.dtype.element_ty), c < C)
    tl.store(out_odd + c, tl.zeros([BC], carries.dtype.element_ty), c < C * tl.minimum(m, 1))
    held_even = tl.zeros([BC], tl.float64)
    held_odd = tl.zeros([BC], tl.float64)
    for start in range(0, T, BK):
        k = start + j
        even, odd = _pair(sums + first, k, c, C, T, m, row)
        more_even, more_odd = _pair(sums + part + first, k, c, C, parted, m, row)
        late_even, late_odd = _pair(sums + first, k - reach, c, C, T, m, row)
        early_even, early_odd = _pair(sums + part + first, k - reach, c, C, parted, m, row)
        late_even, late_odd = _turn(late_even, late_odd, reach_cos, reach_sin)
        early_even, early_odd = _turn(early_even, early_odd, reach_cos, reach_sin)
        even += more_even - late_even - early_even
        odd += more_odd - late_odd - early_odd
        even, odd = _turn(even, odd, cos, -sin)
        whole_even, whole_odd = _turn(
            tl.cumsum(even, 0) + held_even[None, :], tl.cumsum(odd, 0) + held_odd[None, :], cos, sin
        )
        held_even, held_odd = _turn(held_even + tl.sum(even, 0), held_odd + tl.sum(odd, 0), all_cos, all_sin)
        even, odd = _turn(whole_even + late_even, whole_odd + late_odd, one_cos, one_sin)
        at = (k + 1).to(tl.int64)[:, None] * row + c[None, :]
        inside = (k + 1 < T)[:, None]
        tl.store(out_even + at, even.to(carries.dtype.element_ty), inside & (c < C)[None, :])
        tl.store(out_odd + at, odd.to(carries.dtype.element_ty), inside & (c < C * tl.minimum(m, 1))[None, :])


@triton.jit(do_not_specialize=["u", "L", "u_b"])
def _moments_kernel(  # type: ignore[no-untyped-def]
    u, shapes, rows, edges, factors, carries, lengths, out, C, L, N, u_b, u_c, u_l,
    MASKED: tl.constexpr, CUT: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    valid = (t + j < end)[:, None]
    u += b * u_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    tile = b * tl.num_programs(0) + tl.program_id(0)
    here = carries + tile * N * (2 * M - 1) * C
    out += tile * 2 * N * C
    for i in range(N):
        before = _load(u, t - tl.load(shapes + 3 * i), j, c, u_l, u_c, C, L, WIDE)
        v = _branch(x - before, before, factors, here, rows, edges, j, c, C, M, CUT, False, BL)
        v = tl.where(valid, v, 0.0)
        tl.store(out + i * C + c, tl.sum(v, 0), c < C)
        tl.store(out + (N + i) * C + c, tl.sum(v * v, 0), c < C)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        rows += 6 * M * BL
        edges += 2 * M


@triton.jit(do_not_specialize=["u", "y", "L", "u_b", "y_b"])
def _output_kernel(  # type: ignore[no-untyped-def]
    u, shapes, rows, edges, factors, carries, skip, bias, y, C, L, N, u_b, u_c, u_l, y_b, y_c, y_l,
    SKIP: tl.constexpr, CUT: tl.constexpr,
    M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the branches, plus skip times u, plus a bias."""
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    u += b * u_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    total = tl.zeros([BL, BC], WIDE) + tl.load(bias + c, c < C, 0.0)[None, :]
    here = carries + (b * tl.num_programs(0) + tl.program_id(0)) * N * (2 * M - 1) * C
    for n in range(N):
        before = _load(u, t - tl.load(shapes + 3 * n), j, c, u_l, u_c, C, L, WIDE)
        total += _branch(x - before, before, factors, here, rows, edges, j, c, C, M, CUT, False, BL)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        rows += 6 * M * BL
        edges += 2 * M
    if SKIP:
        total += tl.load(skip + c, c < C, 0.0).to(WIDE)[None, :] * x
    inside = (t + j < L)[:, None] & (c < C)[None, :]
    tl.store(_at(y + b * y_b, t, j, c, y_l, y_c), total.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["u", "g", "L", "u_b", "g_b"])
def _products_kernel(  # type: ignore[no-untyped-def]
    u, g, shapes, rows, edges, factors, carries, out, C, L, N, u_b, u_c, u_l, g_b, g_c, g_l,
    CUT: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    u += b * u_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    pull = _load(g + b * g_b, t, j, c, g_l, g_c, C, L, WIDE)
    tile = b * tl.num_programs(0) + tl.program_id(0)
    here = carries + tile * N * (2 * M - 1) * C
    out += tile * (N + 2) * C
    tl.store(out + N * C + c, tl.sum(pull, 0), c < C)
    tl.store(out + (N + 1) * C + c, tl.sum(pull * x, 0), c < C)
    for i in range(N):
        before = _load(u, t - tl.load(shapes + 3 * i), j, c, u_l, u_c, C, L, WIDE)
        v = _branch(x - before, before, factors, here, rows, edges, j, c, C, M, CUT, False, BL)
        tl.store(out + i * C + c, tl.sum(pull * v, 0), c < C)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        rows += 6 * M * BL
        edges += 2 * M


@triton.jit
def _gradient(v, pull, numbers, c, C, N, valid):  # type: ignore[no-untyped-def]
    """Return dc = s g - a - q c where valid, for a branch's c and its numbers s, q and a."""
    s = tl.load(numbers + c, c < C, 0.0)
    q = tl.load(numbers + N * C + c, c < C, 0.0)
    a = tl.load(numbers + 2 * N * C + c, c < C, 0.0)
    return tl.where(valid[:, None], s[None, :] * pull - a[None, :] - q[None, :] * v, 0.0)


@triton.jit(do_not_specialize=["u", "g", "L", "u_b", "g_b", "part"])
def _pull_kernel(  # type: ignore[no-untyped-def]
    u, g, shapes, rows, edges, factors, carries, numbers, lengths, dfactors, sums, C, L, N,
    u_b, u_c, u_l, g_b, g_c, g_l, part,
    MASKED: tl.constexpr, CUT: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the sums of every branch's dc with the basis functions, and its tile's sums in reversed time."""
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    valid = t + j < end
    u += b * u_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    pull = _load(g + b * g_b, t, j, c, g_l, g_c, C, L, WIDE)
    size = N * (2 * M - 1) * C
    tile = b * tl.num_programs(0) + tl.program_id(0)
    here = carries + tile * size
    dfactors += tile * size
    sums += (b * tl.num_programs(0) + tl.num_programs(0) - 1 - tl.program_id(0)) * size
    for i in range(N):
        before = _load(u, t - tl.load(shapes + 3 * i), j, c, u_l, u_c, C, L, WIDE)
        d = x - before
        v = _branch(d, before, factors, here, rows, edges, j, c, C, M, CUT, False, BL)
        v = _gradient(v, pull, numbers, c, C, N, valid)
        _store_sums(v, rows + 2 * M * BL, sums, BL - 1 - j, c, C, M, BL)
        if tl.load(shapes + 3 * i + 2) != 0:
            _store_sums(v, rows + 4 * M * BL, sums + part, BL - 1 - j, c, C, M, BL)
        constant = _sum_from(tl.load(here + c, c < C, 0.0), d, j, False)
        tl.store(dfactors + c, tl.sum(v * constant, 0), c < C)
        for m in tl.static_range(1, M):
            even = tl.load(here + (2 * m - 1) * C + c, c < C, 0.0)
            odd = tl.load(here + 2 * m * C + c, c < C, 0.0)
            even, odd = _wave(d, before, even, odd, rows, edges, j, m, CUT, False, BL)
            tl.store(dfactors + (2 * m - 1) * C + c, tl.sum(v * even, 0), c < C)
            tl.store(dfactors + 2 * m * C + c, tl.sum(v * odd, 0), c < C)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        dfactors += (2 * M - 1) * C
        sums += (2 * M - 1) * C
        numbers += C
        rows += 6 * M * BL
        edges += 2 * M


@triton.jit(do_not_specialize=["u", "g", "du", "L", "u_b", "g_b", "d_b"])
def _back_kernel(  # type: ignore[no-untyped-def]
    u, g, shapes, rows, edges, factors, carries, back, numbers, lengths, skip, du, C, L, N,
    u_b, u_c, u_l, g_b, g_c, g_l, d_b, d_c, d_l,
    MASKED: tl.constexpr, SKIP: tl.constexpr, CUT: tl.constexpr,
    M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """du: the branches of their dc from the end on, which are found again here and a window later, + skip g."""
    i = tl.arange(0, BL)
    j = BL - 1 - i  # rows from a tile's end
    k = tl.num_programs(0) - 1 - tl.program_id(0)
    t = k * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    u += b * u_b
    g += b * g_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    pull = _load(g, t, j, c, g_l, g_c, C, L, WIDE)
    total = tl.zeros([BL, BC], WIDE)
    size = N * (2 * M - 1) * C
    here = carries + (b * tl.num_programs(0) + k) * size
    back += (b * tl.num_programs(0) + tl.program_id(0)) * size
    for n in range(N):
        w = tl.load(shapes + 3 * n)
        before = _load(u, t - w, j, c, u_l, u_c, C, L, WIDE)
        v = _branch(x - before, before, factors, here, rows, edges, j, c, C, M, CUT, True, BL)
        v = _gradient(v, pull, numbers, c, C, N, t + j < end)
        later = tl.zeros([BL, BC], WIDE)
        if t + w < end:
            r = w % BL
            after = _load(u, t + w, j, c, u_l, u_c, C, L, WIDE)
            there = here + (w // BL).to(tl.int64) * size
            if r == 0:
                later = _branch(after - x, x, factors, there, rows, edges, j, c, C, M, CUT, True, BL)
            else:
                gone = tl.where((j < r)[:, None], _load(u, t - r, j, c, u_l, u_c, C, L, WIDE), 0.0)
                come = tl.where((j < r)[:, None], _load(u, t + w - r, j, c, u_l, u_c, C, L, WIDE), 0.0)
                later = _branch_from(
                    after - x, x, come - gone, gone, r, factors, there, rows, edges, j, c, C, M, CUT, True, BL
                )
            later = _gradient(later, _load(g, t + w, j, c, g_l, g_c, C, L, WIDE), numbers, c, C, N, t + w + j < end)
        total += _branch(v - later, later, factors, back, rows, edges, i, c, C, M, CUT, False, BL)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        back += (2 * M - 1) * C
        numbers += C
        rows += 6 * M * BL
        edges += 2 * M
    if SKIP:
        total += tl.load(skip + c, c < C, 0.0).to(WIDE)[None, :] * pull
    inside = (t + j < L)[:, None] & (c < C)[None, :]
    tl.store(_at(du + b * d_b, t, j, c, d_l, d_c), total.to(du.dtype.element_ty), inside)


@dataclass(frozen=True)
class Tables:
    """What the kernels know of the branches beforehand, on a device, computed from angles in float64."""

    shapes: Tensor  # (nb, 3): a window's width, the whole tiles in it, whether sums of part of a tile are needed
    rows: Tensor  # (nb, 3, modes, 2, ROWS): cos and sin of w j; only for those rows of a window's first tile that are
    # in it, else 0; only for the others
    edges: Tensor  # (nb, modes, 2): 1 - cos and sin of w W
    steps: Tensor  # (nb, modes, 2, STEPS + 2): cos and sin of w ROWS times 0 .. STEPS and times the whole tiles
    uneven: tuple[int, ...]  # widths that are not a multiple of their period


@functools.lru_cache(maxsize=64)
def tables(
    widths: tuple[int, ...], periods: tuple[int, ...], modes: int, dtype: torch.dtype, device: torch.device
) -> Tables:
    """Return the tables of these branches, the same ones every time."""
    with torch.inference_mode(False):
        W, period = torch.tensor(widths), torch.tensor(periods)[:, None, None]
        reach = (W + ROWS - 1) // ROWS - 1
        missing = (reach + 1) * ROWS - W
        m = torch.arange(modes)[None, :, None]

        def waves(times: Tensor) -> Tensor:
            """Return cos and sin of w times (nb or 1, n), exact in phase: (nb, modes, 2, n)."""
            angle = ((m * times[:, None]) % period).double() * (2 * math.pi) / period
            return torch.stack([angle.cos(), angle.sin()], 2)

        j = torch.arange(ROWS)
        rows = waves(j[None])
        late = rows * (j >= missing[:, None])[:, None, None]
        edges = waves(W[:, None])[..., 0]
        edges[..., 0] = 1 - edges[..., 0]
        steps = waves(ROWS * torch.cat([torch.arange(STEPS + 1).expand(len(widths), -1), reach[:, None]], 1))
        shapes = torch.stack([W, reach, (missing > 0) & (reach > 0)], 1)
        return Tables(
            shapes.to(device, torch.int32),
            torch.stack([rows, late, rows - late], 1).to(device, dtype),
            edges.to(device, dtype),
            steps.to(device),
            tuple(w for w, n in zip(widths, periods, strict=True) if w % n),
        )


class ModeWindows:
    """Branches of windows and modes over inputs like u (B, C, L), computed in a dtype."""

    def __init__(
        self, u: Tensor, widths: Sequence[int], periods: Sequence[int], modes: int, dtype: torch.dtype
    ) -> None:
        self.tables = tables(tuple(widths), tuple(periods), modes, dtype, u.device)
        self.nb, self.modes, self.rank, self.dtype = len(widths), modes, 2 * modes - 1, dtype
        self.waves = (self.tables.shapes, self.tables.rows, self.tables.edges)
        self.wide = {"M": modes, "WIDE": tl.float64 if dtype == torch.float64 else tl.float32}
        self.cut = {"CUT": any(w < u.shape[2] for w in self.tables.uneven)}
        self.tile = {"BL": ROWS, "BC": COLUMNS, "num_warps": WARPS}

    def _numbers(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape, dtype=self.dtype)

    def carries(self, u: Tensor) -> Tensor:
        """Return e^{i w} Z[t0 - 1] of every tile, (B, tiles, nb, rank, C)."""
        grid, (B, C, L) = tiles(u, ROWS, COLUMNS), u.shape
        sums = self._numbers(2, B, grid[0], self.nb, self.rank, C, like=u)
        _sums_kernel[grid](
            u, self.tables.shapes, self.tables.rows, sums, C, L, self.nb, *u.stride(), sums.stride(0),
            **self.wide, **self.tile,
        )  # fmt: skip
        return self.carries_from(sums)

    def carries_from(self, sums: Tensor) -> Tensor:
        """Return the carries, given every tile's sums (2, B, tiles, nb, rank, C)."""
        _, B, T, nb, _, C = sums.shape
        carries = torch.empty_like(sums[0])
        _carries_kernel[(nb * self.modes, triton.cdiv(C, COLUMNS), B)](
            sums, carries, self.tables.shapes, self.tables.steps, C, T, nb, sums.stride(0),
            M=self.modes, BK=STEPS, BC=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return carries

    def moments(self, u: Tensor, carries: Tensor, factors: Tensor, lengths: Tensor | None) -> Tensor:
        """Sums of c_b and of c_b^2 over batch and valid positions, (2, nb, C), for factors (nb, rank, C)."""
        grid, (_, C, L) = tiles(u, ROWS, COLUMNS), u.shape
        parts = self._numbers(grid[0] * grid[2], 2, self.nb, C, like=u)
        _moments_kernel[grid](
            u, *self.waves, factors, carries, u if lengths is None else lengths, parts, C, L, self.nb, *u.stride(),
            MASKED=lengths is not None, **self.cut, **self.wide, **self.tile,
        )  # fmt: skip
        return parts.sum(0, dtype=torch.float64)

    def output(self, u: Tensor, carries: Tensor, factors: Tensor, skip: Tensor | None, bias: Tensor) -> Tensor:
        """y = sum over branches and basis functions, weighted by factors (nb, rank, C), + skip u + bias."""
        y = torch.empty_like(u)
        _output_kernel[tiles(u, ROWS, COLUMNS)](
            u, *self.waves, factors, carries, bias if skip is None else skip, bias, y, *u.shape[1:], self.nb,
            *u.stride(), *y.stride(), SKIP=skip is not None, **self.cut, **self.wide, **self.tile,
        )  # fmt: skip
        return y

    def products(self, u: Tensor, g: Tensor, carries: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over batch and time of g c_b (nb, C), of g (C,) and of g u (C,)."""
        grid, (_, C, L) = tiles(u, ROWS, COLUMNS), u.shape
        parts = self._numbers(grid[0] * grid[2], self.nb + 2, C, like=u)
        _products_kernel[grid](
            u, g, *self.waves, factors, carries, parts, C, L, self.nb, *u.stride(), *g.stride(),
            **self.cut, **self.wide, **self.tile,
        )  # fmt: skip
        total = parts.sum(0, dtype=torch.float64).to(self.dtype)
        return total[: self.nb], total[self.nb], total[self.nb + 1]

    def pull(
        self,
        u: Tensor,
        g: Tensor,
        carries: Tensor,
        factors: Tensor,
        numbers: Tensor,
        skip: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return du and the factors' gradient for dc_b = s_b g - a_b - q_b c_b; numbers (3, nb, C) are s, q and a."""
        grid, (B, C, L) = tiles(u, ROWS, COLUMNS), u.shape
        du = torch.empty_like(u)
        parts = self._numbers(grid[0] * B, *factors.shape, like=u)
        sums = self._numbers(2, B, grid[0], *factors.shape, like=u)
        ends = u if lengths is None else lengths
        given = {"MASKED": lengths is not None, **self.cut, **self.wide, **self.tile}
        _pull_kernel[grid](
            u, g, *self.waves, factors, carries, numbers, ends, parts, sums, C, L, self.nb, *u.stride(), *g.stride(),
            sums.stride(0), **given,
        )  # fmt: skip
        dfactors = parts.sum(0, dtype=torch.float64)
        _back_kernel[grid](
            u, g, *self.waves, factors, carries, self.carries_from(sums), numbers, ends,
            numbers if skip is None else skip, du, C, L, self.nb, *u.stride(), *g.stride(), *du.stride(),
            SKIP=skip is not None, **given,
        )  # fmt: skip
        return du, dfactors
