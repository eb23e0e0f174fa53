"""Branches whose kernels are a few Fourier modes, as moving sums of u[s] e^{i w (t-s)}; by Triton.

The algorithm is that of `moving_sum_triton.py` with a complex moving sum for every mode. A branch's kernel is a sum of
modes e^{i w tau} over lags 0 .. W - 1. In the tile of TILE_TIME positions that starts at t0, with j = t - t0,

    Z[t]  =  sum_{s = t-W+1 .. t} x[s] e^{i w (t-s)}
          =  e^{i w j} (carry + sum_{i <= j} (x[t0+i] - f x[t0+i-W]) e^{-i w i})

where f = e^{i w W}, and carry = e^{i w} Z[t0 - 1] is assembled from sums of x[s] e^{-i w i} over whole tiles.
The real and imaginary parts of Z are the basis functions (1 for w = 0, else 2) that a branch's coefficients weight.
All phases are relative to a tile's start, and the exact values added to a carry are later subtracted from it, so that
errors do not accumulate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import cached_on_device, compute_dtype, constants
from .._triton import add_parts, allocate_branch_gradients, fold_parts, narrow, tiles, wide, widen

TILE_TIME, TILE_CHANNELS, WARPS = 32, 32, 1  # one channel per thread makes cumulative sums cheapest
STEPS = 8  # tiles whose carries are computed at a time
SUM_PARTS, SUM_CHANNELS = 32, 32  # of the coefficients' gradients that a program adds at a time
SLICE_BYTES = 128 * 2**20  # of all branches' gradients in memory at a time, about


@triton.jit
def _at(x, t, j, c, x_l, x_c):  # type: ignore[no-untyped-def]
    """Return pointers to positions t + j and channels c: 64-bit offsets to a tile's start, 32-bit within."""
    first = x + tl.full([], t, tl.int64) * x_l + c.to(tl.int64) * x_c
    return first[None, :] + (j * x_l)[:, None]


@triton.jit
def _load(x, t, j, c, x_l, x_c, C, L, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x at positions t + j and channels c, zero outside."""
    inside = (t + j).to(tl.uint32) < L.to(tl.uint32)
    return tl.load(_at(x, t, j, c, x_l, x_c), inside[:, None] & (c < C)[None, :], 0.0).to(WIDE)


@triton.jit
def _sum_from(start, x, i):  # type: ignore[no-untyped-def]
    """Return the cumulative sum over positions i = 0, 1, ..., beginning with `start` before position 0."""
    return tl.cumsum(tl.where((i == 0)[:, None], x + start[None, :], x), 0)


@triton.jit
def _mode(d, before, carry, phases, edges, i, c, C, m: tl.constexpr, CUT: tl.constexpr, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the real and imaginary part of Z for mode m > 0; d is x - before, `before` being x[t - W]."""
    cos = tl.load(phases + 2 * m * BL + i)[:, None]
    sin = tl.load(phases + (2 * m + 1) * BL + i)[:, None]
    even = tl.load(carry + (2 * m - 1) * C + c, c < C, 0.0)
    odd = tl.load(carry + 2 * m * C + c, c < C, 0.0)
    if CUT:
        d += before * tl.load(edges + 2 * m)
        turned = before * tl.load(edges + 2 * m + 1)
        even = _sum_from(even, d * cos - turned * sin, i)
        odd = _sum_from(-odd, d * sin + turned * cos, i)
    else:
        even = _sum_from(even, d * cos, i)
        odd = _sum_from(-odd, d * sin, i)
    return even * cos + odd * sin, even * sin - odd * cos


@triton.jit
def _branch(  # type: ignore[no-untyped-def]
    d, before, factors, carry, phases, edges, i, c, C, M: tl.constexpr, CUT: tl.constexpr, BL: tl.constexpr
):
    """Return a branch's output in this tile."""
    y = _sum_from(tl.load(carry + c, c < C, 0.0), d, i) * tl.load(factors + c, c < C, 0.0)[None, :]
    for m in tl.static_range(1, M):
        even, odd = _mode(d, before, carry, phases, edges, i, c, C, m, CUT, BL)
        y += even * tl.load(factors + (2 * m - 1) * C + c, c < C, 0.0)[None, :]
        y += odd * tl.load(factors + 2 * m * C + c, c < C, 0.0)[None, :]
    return y


@triton.jit
def _store_sums(x, phases, out, j, c, C, M: tl.constexpr, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums over positions of x times e^{-i w j}."""
    tl.store(out + c, tl.sum(x * tl.load(phases + j)[:, None], 0), c < C)
    for m in tl.static_range(1, M):
        even = tl.sum(x * tl.load(phases + 2 * m * BL + j)[:, None], 0)
        odd = tl.sum(x * tl.load(phases + (2 * m + 1) * BL + j)[:, None], 0)
        tl.store(out + (2 * m - 1) * C + c, even, c < C)
        tl.store(out + 2 * m * C + c, -odd, c < C)


@triton.jit
def _coefficients_kernel(values, factors, out, C, RAW: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store coefficients (N, K, C) from values (N, C, K) or, if RAW, from modes (N, C, K + 1) and their factors."""
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    for k in tl.static_range(K):
        e = k + (RAW and k > 0)
        value = widen(tl.load(values + (n * C + c) * (K + RAW) + e, c < C, 0.0))
        if RAW:
            value *= tl.load(factors + n * (K + 1) + e)
        tl.store(out + (n * K + k) * C + c, narrow(value, out), c < C)


@triton.jit(do_not_specialize=["P"])
def _values_gradient_kernel(  # type: ignore[no-untyped-def]
    parts, factors, out, P, C, RAW: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Store the gradient of the values from partial sums (P, N, K, C) of the coefficients' gradient."""
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    at = out + (n * C + c) * (K + RAW)
    for k in tl.static_range(K):
        e = k + (RAW and k > 0)
        total = add_parts(parts, (n * K + k) * C, tl.num_programs(0) * K * C, P, c, C, BP, BC)
        if RAW:
            total *= tl.load(factors + n * (K + 1) + e)
        tl.store(at + e, narrow(total, out), c < C)
    if RAW:
        tl.store(at + 1, narrow(tl.zeros([BC], tl.float64), out), c < C)


@triton.jit(do_not_specialize=["x", "L", "x_b", "part"])
def _sums_kernel(  # type: ignore[no-untyped-def]
    x, shapes, phases, out, C, L, N, x_b, x_c, x_l, part,
    M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    v = _load(x + b * x_b, tl.program_id(0) * BL, j, c, x_l, x_c, C, L, WIDE)
    here = out + (b * tl.num_programs(0) + tl.program_id(0)) * N * (2 * M - 1) * C
    for i in range(N):
        _store_sums(v, phases + (6 * i + 2) * M * BL, here, j, c, C, M, BL)
        if tl.load(shapes + 3 * i + 2) != 0:
            _store_sums(v, phases + (6 * i + 4) * M * BL, here + part, j, c, C, M, BL)
        here += (2 * M - 1) * C


@triton.jit
def _pair(sums, k, c, C, T, m, stride):  # type: ignore[no-untyped-def]
    """Return mode m's sums of tiles k as a complex pair, zero outside of 0 .. T - 1."""
    inside = ((k >= 0) & (k < T))[:, None]
    at = sums + k.to(tl.int64)[:, None] * stride + c[None, :]
    even = tl.load(at + tl.maximum(2 * m - 1, 0) * C, inside & (c < C)[None, :], 0.0).to(tl.float64)
    odd = tl.load(at + 2 * m * C, inside & (c < C * tl.minimum(m, 1))[None, :], 0.0).to(tl.float64)
    return even, odd


@triton.jit
def _turn(x, y, cos, sin):  # type: ignore[no-untyped-def]
    """Multiply x + iy by cos + i sin."""
    return x * cos - y * sin, x * sin + y * cos


@triton.jit(do_not_specialize=["sums", "carries", "C", "T", "N", "part"])
def _carries_kernel(  # type: ignore[no-untyped-def]
    sums, carries, shapes, steps, C, T, N, part, M: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr
):
    i = tl.program_id(0) // M
    m = tl.program_id(0) % M
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    stride = (N * (2 * M - 1) * C).to(tl.int64)
    first = tl.program_id(2).to(tl.int64) * T * stride + i * (2 * M - 1) * C
    reach = tl.load(shapes + 3 * i + 1)
    parted = T * tl.load(shapes + 3 * i + 2)  # tiles with separate sums over the positions that are not in the window
    turns = steps + tl.program_id(0) * 2 * (BK + 2)  # rotations by 0 .. BK tiles, and by the window's whole tiles
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
        even, odd = _pair(sums + first, k, c, C, T, m, stride)
        more_even, more_odd = _pair(sums + part + first, k, c, C, parted, m, stride)
        late_even, late_odd = _pair(sums + first, k - reach, c, C, T, m, stride)
        early_even, early_odd = _pair(sums + part + first, k - reach, c, C, parted, m, stride)
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
        at = (k + 1).to(tl.int64)[:, None] * stride + c[None, :]
        inside = (k + 1 < T)[:, None]
        tl.store(out_even + at, even.to(carries.dtype.element_ty), inside & (c < C)[None, :])
        tl.store(out_odd + at, odd.to(carries.dtype.element_ty), inside & (c < C * tl.minimum(m, 1))[None, :])


@triton.jit(do_not_specialize=["u", "L", "u_b"])
def _moments_kernel(  # type: ignore[no-untyped-def]
    u, shapes, phases, edges, factors, carries, lengths, out, C, L, N, u_b, u_c, u_l,
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
        v = _branch(x - before, before, factors, here, phases, edges, j, c, C, M, CUT, BL)
        v = tl.where(valid, v, 0.0)
        tl.store(out + i * C + c, tl.sum(v, 0), c < C)
        tl.store(out + (N + i) * C + c, tl.sum(v * v, 0), c < C)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        phases += 6 * M * BL
        edges += 2 * M


@triton.jit(do_not_specialize=["x", "other", "y", "L", "x_n", "x_b", "o_b", "y_b"])
def _output_kernel(  # type: ignore[no-untyped-def]
    x, other, shapes, phases, edges, factors, carries, scale, skip, bias, y, C, L, N,
    x_n, x_b, x_c, x_l, o_b, o_c, o_l, y_b, y_c, y_l,
    SKIP: tl.constexpr, REVERSE: tl.constexpr, CUT: tl.constexpr,
    M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum scaled branches of one x and biases or, if REVERSE, of one x per branch from the end; add skip other."""
    i = tl.arange(0, BL)
    j = i
    t = tl.program_id(0) * BL
    if REVERSE:
        j = -i
        t = tl.num_programs(0) * BL - 1 - t
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    x += b * x_b
    if REVERSE:
        total = tl.zeros([BL, BC], WIDE)
    else:
        v = _load(x, t, j, c, x_l, x_c, C, L, WIDE)
        total = tl.zeros([BL, BC], WIDE)
        for n in range(N):
            total += tl.load(bias + n * C + c, c < C, 0.0)[None, :]
    here = carries + (b * tl.num_programs(0) + tl.program_id(0)) * N * (2 * M - 1) * C
    for n in range(N):
        w = tl.load(shapes + 3 * n)
        if REVERSE:
            v = _load(x, t, j, c, x_l, x_c, C, L, WIDE)
            before = _load(x, t + w, j, c, x_l, x_c, C, L, WIDE)
            x += x_n
        else:
            before = _load(x, t - w, j, c, x_l, x_c, C, L, WIDE)
        branch = _branch(v - before, before, factors, here, phases, edges, i, c, C, M, CUT, BL)
        if not REVERSE:
            branch *= tl.load(scale + n * C + c, c < C, 0.0)[None, :]
        total += branch
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        phases += 6 * M * BL
        edges += 2 * M
    if SKIP:
        d = tl.load(skip + c, c < C, 0.0).to(WIDE)
        total += d[None, :] * _load(other + b * o_b, t, j, c, o_l, o_c, C, L, WIDE)
    inside = (t + j < L)[:, None] & (c < C)[None, :]
    tl.store(_at(y + b * y_b, t, j, c, y_l, y_c), total.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["u", "g", "L", "u_b", "g_b"])
def _products_kernel(  # type: ignore[no-untyped-def]
    u, g, shapes, phases, edges, factors, carries, out, C, L, N, u_b, u_c, u_l, g_b, g_c, g_l,
    CUT: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    u += b * u_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    grad = _load(g + b * g_b, t, j, c, g_l, g_c, C, L, WIDE)
    tile = b * tl.num_programs(0) + tl.program_id(0)
    here = carries + tile * N * (2 * M - 1) * C
    out += tile * (N + 2) * C
    tl.store(out + N * C + c, tl.sum(grad, 0), c < C)
    tl.store(out + (N + 1) * C + c, tl.sum(grad * x, 0), c < C)
    for i in range(N):
        before = _load(u, t - tl.load(shapes + 3 * i), j, c, u_l, u_c, C, L, WIDE)
        v = _branch(x - before, before, factors, here, phases, edges, j, c, C, M, CUT, BL)
        tl.store(out + i * C + c, tl.sum(grad * v, 0), c < C)
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        phases += 6 * M * BL
        edges += 2 * M


@triton.jit(do_not_specialize=["u", "g", "dc", "L", "u_b", "g_b", "d_n", "d_b", "part"])
def _gradient_kernel(  # type: ignore[no-untyped-def]
    u, g, shapes, phases, edges, factors, carries, s, q, a, lengths, dc, dfactors, sums, C, L, N,
    u_b, u_c, u_l, g_b, g_c, g_l, d_n, d_b, d_c, d_l, part,
    MASKED: tl.constexpr, CUT: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store every branch's dc, its sums with the basis functions, and its tile's sums in reversed time."""
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    real = (c < C)[None, :]
    valid = (t + j < end)[:, None] & real
    u += b * u_b
    x = _load(u, t, j, c, u_l, u_c, C, L, WIDE)
    grad = _load(g + b * g_b, t, j, c, g_l, g_c, C, L, WIDE)
    size = N * (2 * M - 1) * C
    tile = b * tl.num_programs(0) + tl.program_id(0)
    here = carries + tile * size
    dfactors += tile * size
    sums += (b * tl.num_programs(0) + tl.num_programs(0) - 1 - tl.program_id(0)) * size
    at = _at(dc + b * d_b, t, j, c, d_l, d_c)
    for i in range(N):
        before = _load(u, t - tl.load(shapes + 3 * i), j, c, u_l, u_c, C, L, WIDE)
        d = x - before
        v = _branch(d, before, factors, here, phases, edges, j, c, C, M, CUT, BL)
        v = tl.load(s + i * C + c, c < C, 0.0)[None, :] * grad - tl.load(q + i * C + c, c < C, 0.0)[None, :] * v
        v = tl.where(valid, v - tl.load(a + i * C + c, c < C, 0.0)[None, :], 0.0)
        v = v.to(dc.dtype.element_ty).to(WIDE)  # as it is stored: a carry subtracts exactly what was added to it
        tl.store(at, v, (t + j < L)[:, None] & real)
        _store_sums(v, phases + 2 * M * BL, sums, BL - 1 - j, c, C, M, BL)
        if tl.load(shapes + 3 * i + 2) != 0:
            _store_sums(v, phases + 4 * M * BL, sums + part, BL - 1 - j, c, C, M, BL)
        constant = _sum_from(tl.load(here + c, c < C, 0.0), d, j)
        tl.store(dfactors + c, tl.sum(v * constant, 0), c < C)
        for m in tl.static_range(1, M):
            even, odd = _mode(d, before, here, phases, edges, j, c, C, m, CUT, BL)
            tl.store(dfactors + (2 * m - 1) * C + c, tl.sum(v * even, 0), c < C)
            tl.store(dfactors + 2 * m * C + c, tl.sum(v * odd, 0), c < C)
        at += d_n
        factors += (2 * M - 1) * C
        here += (2 * M - 1) * C
        dfactors += (2 * M - 1) * C
        sums += (2 * M - 1) * C
        phases += 6 * M * BL
        edges += 2 * M


@dataclass(frozen=True)
class Tables:
    """Constants of the branches, on a device, computed from angles in float64."""

    shapes: Tensor  # (N, 3): a window's width, its number of whole tiles, whether partial sums of a tile are needed
    phases: Tensor  # (N, 3, modes, 2, TILE_TIME): cos and sin of w j at positions j of a tile. Index 0 has all
    # positions, 1 those of the window's first tile that are in the window (else 0), 2 those that are not (else 0)
    edges: Tensor  # (N, modes, 2): 1 - cos and sin of w W
    steps: Tensor  # (N, modes, 2, STEPS + 2): cos and sin of w TILE_TIME times 0 .. STEPS and times the whole tiles
    uneven: tuple[int, ...]  # widths that are not a multiple of their period


@cached_on_device(maxsize=64)
def tables(
    widths: tuple[int, ...], periods: tuple[int, ...], modes: int, dtype: torch.dtype, device: torch.device
) -> Tables:
    """Return the tables of these branches; cached."""
    W, period = torch.tensor(widths), torch.tensor(periods)[:, None, None]
    reach = (W + TILE_TIME - 1) // TILE_TIME - 1
    missing = (reach + 1) * TILE_TIME - W
    m = torch.arange(modes)[None, :, None]

    def cos_sin(times: Tensor) -> Tensor:
        """Return cos and sin of w times (N or 1, n), reduced exactly to one period: (N, modes, 2, n)."""
        angle = ((m * times[:, None]) % period).double() * (2 * math.pi) / period
        return torch.stack([angle.cos(), angle.sin()], 2)

    j = torch.arange(TILE_TIME)
    phases = cos_sin(j[None])
    late = phases * (j >= missing[:, None])[:, None, None]
    edges = cos_sin(W[:, None])[..., 0]
    edges[..., 0] = 1 - edges[..., 0]
    steps = cos_sin(TILE_TIME * torch.cat([torch.arange(STEPS + 1).expand(len(widths), -1), reach[:, None]], 1))
    shapes = torch.stack([W, reach, (missing > 0) & (reach > 0)], 1)
    return Tables(
        shapes.to(device, torch.int32),
        torch.stack([phases, late, phases - late], 1).to(device, dtype),
        edges.to(device, dtype),
        steps.to(device),
        tuple(w for w, n in zip(widths, periods, strict=True) if w % n),
    )


class MovingModes:
    """Branches of M modes each over u (B, C, L), given as in `ModeKernels`."""

    heights = None

    def __init__(
        self,
        u: Tensor,
        values: Tensor,
        lengths: Tensor | None,
        widths: Sequence[int],
        periods: Sequence[int],
        factors: Sequence[float],
    ) -> None:
        self.u, self.values, self.lengths, self.dtype = u, values.contiguous(), lengths, compute_dtype(u, values)
        self.N, self.modes = len(widths), (values[0, 0].numel() + 1) // 2
        self.tables = tables(tuple(widths), tuple(periods), self.modes, self.dtype, u.device)
        self.raw, self.value_factors = bool(factors), constants(factors or [1.0], u, torch.float64)
        self.constants = (self.tables.shapes, self.tables.phases, self.tables.edges)
        self.options = {
            "M": self.modes, "WIDE": wide(self.dtype), "BL": TILE_TIME, "BC": TILE_CHANNELS, "num_warps": WARPS,
        }  # fmt: skip
        self.cut = {"CUT": any(w < u.shape[2] for w in self.tables.uneven)}
        self.grid = tiles(u, TILE_TIME, TILE_CHANNELS)
        self.factors = self._coefficients()
        self.carries = self._carries()

    def _coefficients(self) -> Tensor:
        """Return the coefficients (N, 2 M - 1, C)."""
        C, K = self.u.shape[1], 2 * self.modes - 1
        out = self._empty(self.N, K, C)
        _coefficients_kernel[self.N, triton.cdiv(C, SUM_CHANNELS)](
            self.values, self.value_factors, out, C, RAW=self.raw, K=K, BC=SUM_CHANNELS
        )
        return out

    def _empty(self, *shape: int) -> Tensor:
        return self.u.new_empty(shape, dtype=self.dtype)

    def _carries(self) -> Tensor:
        """Return e^{i w} Z[t0 - 1] of every tile, (B, tiles, N, 2 M - 1, C)."""
        u, (B, C, L) = self.u, self.u.shape
        sums = self._empty(2, B, self.grid[0], *self.factors.shape)
        _sums_kernel[self.grid](
            u, self.tables.shapes, self.tables.phases, sums, C, L, self.N, *u.stride(), sums.stride(0), **self.options
        )
        return self._carries_from(sums)

    def _carries_from(self, sums: Tensor) -> Tensor:
        """Return the carries, given the sums of every tile (2, B, tiles, N, 2 M - 1, C)."""
        _, B, T, N, _, C = sums.shape
        carries = torch.empty_like(sums[0])
        _carries_kernel[(N * self.modes, triton.cdiv(C, TILE_CHANNELS), B)](
            sums, carries, self.tables.shapes, self.tables.steps, C, T, N, sums.stride(0),
            M=self.modes, BK=STEPS, BC=TILE_CHANNELS, num_warps=WARPS,
        )  # fmt: skip
        return carries

    def moments(self) -> tuple[Tensor, None]:
        """Return partial sums of c_b and of c_b^2 over batch and valid positions, (P, 2, N, C)."""
        u, lengths, (_, C, L) = self.u, self.lengths, self.u.shape
        parts = self._empty(self.grid[0] * self.grid[2], 2, self.N, C)
        _moments_kernel[self.grid](
            u, *self.constants, self.factors, self.carries, u if lengths is None else lengths, parts, C, L, self.N,
            *u.stride(), MASKED=lengths is not None, **self.cut, **self.options,
        )  # fmt: skip
        return parts, None

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, like u."""
        y = torch.empty_like(self.u)
        self._output(self.u, 0, self.u, self.carries, scale, skip, shift, y, REVERSE=False)
        return y

    def _output(
        self, x: Tensor, x_n: int, other: Tensor, carries: Tensor, scale: Tensor, skip: Tensor | None, bias: Tensor,
        y: Tensor, REVERSE: bool,
    ) -> None:  # fmt: skip
        _output_kernel[tiles(y, TILE_TIME, TILE_CHANNELS)](
            x, other, *self.constants, self.factors, carries, scale, bias if skip is None else skip, bias, y,
            *y.shape[1:], self.N, x_n, *x.stride()[-3:], *other.stride(), *y.stride(),
            SKIP=skip is not None, REVERSE=REVERSE, **self.cut, **self.options,
        )  # fmt: skip

    def products(self, grad: Tensor) -> Tensor:
        """Return partial sums over batch and time, (P, N + 2, C), of g c_b, of g and of g u."""
        self.g, u, (_, C, L) = grad, self.u, self.u.shape
        parts = self._empty(self.grid[0] * self.grid[2], self.N + 2, C)
        _products_kernel[self.grid](
            u, grad, *self.constants, self.factors, self.carries, parts, C, L, self.N, *u.stride(), *grad.stride(),
            **self.cut, **self.options,
        )  # fmt: skip
        return parts

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the coefficients for dc_b = s_b g - a_b - q_b c_b.

        Some sequences at a time, because dc_b of all branches is in memory; in half precision if u is.
        """
        u, g, du = self.u, self.g, torch.empty_like(self.u)
        parts = self._empty(len(u), self.grid[0], *self.factors.shape)
        scratch = allocate_branch_gradients(u, self.N, SLICE_BYTES, self.dtype)
        for start in range(0, len(u), scratch.shape[1]):
            some = slice(start, start + scratch.shape[1])
            dc = scratch[:, : len(u[some])]
            carries = self._carries_from(self._branch_gradients(some, (s, q, a), dc, parts[some]))
            self._output(dc, dc.stride(0), g[some], carries, s, skip, s, du[some], REVERSE=True)
        return du, self._values_gradient(parts.flatten(0, 1))

    def _branch_gradients(self, some: slice, factors: tuple[Tensor, ...], dc: Tensor, parts: Tensor) -> Tensor:
        """Write dc (N, b, C, L) of some sequences and the coefficients' gradients; return dc's reversed tile sums."""
        u, g, lengths = self.u[some], self.g[some], None if self.lengths is None else self.lengths[some]
        grid, (B, C, L) = tiles(u, TILE_TIME, TILE_CHANNELS), u.shape
        sums = self._empty(2, B, grid[0], *self.factors.shape)
        _gradient_kernel[grid](
            u, g, *self.constants, self.factors, self.carries[some], *factors, u if lengths is None else lengths,
            dc, parts, sums, C, L, self.N, *u.stride(), *g.stride(), *dc.stride(), sums.stride(0),
            MASKED=lengths is not None, **self.cut, **self.options,
        )  # fmt: skip
        return sums

    def _values_gradient(self, parts: Tensor) -> Tensor:
        """Return the gradient of the values from partial sums (P, N, 2 M - 1, C) of the coefficients' gradient."""
        parts, C, K = fold_parts(parts), self.u.shape[1], 2 * self.modes - 1
        out = torch.empty_like(self.values)
        _values_gradient_kernel[self.N, triton.cdiv(C, SUM_CHANNELS)](
            parts, self.value_factors, out, len(parts), C, RAW=self.raw, K=K, BP=SUM_PARTS, BC=SUM_CHANNELS
        )
        return out
