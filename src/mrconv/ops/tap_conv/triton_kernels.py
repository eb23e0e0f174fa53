"""Triton kernels for taps at lags. Tensors are (B, C, L) with any strides; a program computes a tile of (L, C).

Lags ascend, so that a program loads with masks only where a shifted tile leaves the sequence, and skips the taps whose
shifted tile lies outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

import triton

from .._common import constants
from .._triton import cast, int32_constants, offsets, tiles, wide
from .._triton import gelu as gelu_of

TILE_TIME, TILE_CHANNELS = 64, 64  # of a tile of outputs
UNROLL = 4  # taps whose inputs a program loads at a time
WARPS, REGISTERS = 4, 128  # 4 programs of 4 warps with at most 128 registers fit on a multiprocessor
FAR = tl.constexpr(2**30)  # beyond every position


@triton.jit
def load_tile(x, inside, channels, MASKED: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile, zero outside; without MASKED all positions are inside, with EVEN all channels."""
    if MASKED:
        if EVEN:
            tile = tl.load(x, inside[:, None], 0.0)
        else:
            tile = tl.load(x, inside[:, None] & channels[None, :], 0.0)
    elif EVEN:
        tile = tl.load(x)
    else:
        tile = tl.load(x, channels[None, :], 0.0)
    return tile


@triton.jit
def _add_tap(  # type: ignore[no-untyped-def]
    total, x, at, stride, lags, bases, values, c, C, begin, low, high, limit, j,
    BASES: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    lag = tl.load(lags + j)
    shift = begin - lag
    if BASES:
        shift += tl.load(bases + j)
    if EVEN:
        v = tl.load(values + j * C + c).to(WIDE)
    else:
        v = tl.load(values + j * C + c, c < C, 0.0).to(WIDE)
    t = begin + tl.arange(0, BL)
    inside = (t - lag >= low) & (t - lag < high) & (t < limit)
    tile = load_tile(x + shift.to(tl.int64) * stride + at, inside, c < C, MASKED, EVEN)
    return total + cast(tile, WIDE) * v[None, :]


@triton.jit
def add_taps(  # type: ignore[no-untyped-def]
    total, x, at, stride, lags, bases, values, c, C, begin, low, high, limit, taps,
    BASES: tl.constexpr, TAPS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Add sum_j values[j] x[t - lags[j]] for the positions from `begin` on where low <= t - lag < high and t < limit.

    With BASES, tap j reads x at t - lags[j] + bases[j]. TAPS is a power of 2, at least `taps`.
    """
    k = tl.arange(0, TAPS)
    every = tl.load(lags + k, k < taps, 2**31 - 1)
    first = tl.sum((every <= begin - high).to(tl.int32), 0)
    last = tl.sum((every < begin + BL - low).to(tl.int32), 0)
    inner = tl.sum((every < begin + BL - high).to(tl.int32), 0)  # from here to `outer` all of the tile is inside
    outer = tl.maximum(tl.sum((every <= begin - low).to(tl.int32), 0), inner)
    whole = tl.where(begin + BL <= limit, (outer - inner) // UNROLL * UNROLL, 0)
    for i in range(first, last - whole):
        j = tl.where(i < inner, i, i + whole)
        total = _add_tap(
            total, x, at, stride, lags, bases, values, c, C, begin, low, high, limit, j, BASES, True, EVEN, WIDE, BL
        )
    for start in range(inner, inner + whole, UNROLL):
        for m in tl.static_range(UNROLL):
            total = _add_tap(
                total, x, at, stride, lags, bases, values, c, C, begin, low, high, limit, start + m,
                BASES, False, EVEN, WIDE, BL,
            )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["L", "shifts", "taps"])
def _conv_kernel(  # type: ignore[no-untyped-def]
    u, values, lags, shift, y, L, shifts, taps, u_b, u_c, u_l, y_b, y_c, y_l,
    C: tl.constexpr, DENSE: tl.constexpr, GELU: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    TAPS: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BL
    k = tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    if DENSE:  # constants save instructions
        u_c, u_l = 1, C
    total = tl.zeros([BL, BC], WIDE)
    for n in range(shifts):
        total += tl.load(shift + n * C + c, c < C, 0.0).to(WIDE)[None, :]
    total = add_taps(
        total, u + b * u_b, offsets(k, c, u_l, u_c), u_l, lags, lags, values, c, C, begin, 0, L, L, taps,
        False, TAPS, EVEN, WIDE, BL, UNROLL,
    )  # fmt: skip
    if GELU:
        total = gelu_of(total)
    inside = (begin + k < L)[:, None] & (c < C)[None, :]
    tl.store(y + b * y_b + offsets(begin + k, c, y_l, y_c), total.to(y.dtype.element_ty), inside)


def is_dense(*tensors: Tensor) -> bool:
    """Return whether the channels of tensors (B, C, L) are next to each other, and positions without gaps."""
    return all(x.stride()[1:] == (1, x.shape[1]) for x in tensors)


def convolve(
    u: Tensor, values: Tensor, lags: Sequence[int], y: Tensor, shift: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Write sum_j values[j] u[t - lags[j]] + shift to y, with GELU if `gelu`; values (T, C), shift (C,) or (N, C).

    Several shifts are added up.
    """
    order = sorted(range(len(lags)), key=lags.__getitem__)
    if order != list(range(len(lags))):
        values, lags = values.index_select(0, constants(order, values)), sorted(lags)
    C, L = u.shape[1:]
    shifts = 0 if shift is None else shift.numel() // max(C, 1)
    _conv_kernel[tiles(u, TILE_TIME, TILE_CHANNELS)](
        u, values, int32_constants(lags, u), u if shift is None else shift.contiguous(), y, L, shifts, len(lags),
        *u.stride(), *y.stride(), C=C, DENSE=is_dense(u), GELU=gelu, EVEN=C % TILE_CHANNELS == 0,
        WIDE=wide(values.dtype), TAPS=triton.next_power_of_2(max(1, len(lags))), BL=TILE_TIME, BC=TILE_CHANNELS,
        UNROLL=UNROLL, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return y
