"""Triton kernels for taps at lags. Tensors are (B, C, L) with any strides; a program computes a tile of (L, C)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import gelu as gelu_of
from .._triton import int32_constants, offsets, tiles, wide

TILE_TIME, TILE_CHANNELS = 128, 32  # of a tile of outputs
UNROLL = 4  # taps whose inputs a program loads at a time
SPAN, STEP = 512, 16  # positions per program that sums taps' gradients, and per iteration
GROUP = 8  # taps per such program, a power of 2


@triton.jit(do_not_specialize=["L", "N"])
def _conv_kernel(  # type: ignore[no-untyped-def]
    u, values, lags, starts, sources, gain, shift, mix, g, lengths, y, C, L, N,
    u_n, u_b, u_c, u_l, g_b, g_c, g_l, y_n, y_b, y_c, y_l,
    STACKED: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr, MIX: tl.constexpr, MASKED: tl.constexpr,
    GELU: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n = tl.program_id(2) % N
    b = (tl.program_id(2) // N).to(tl.int64)
    last = tl.load(starts + n + 1)
    total = tl.zeros([BL, BC], WIDE)
    for first in range(tl.load(starts + n), last, UNROLL):
        for k in tl.static_range(UNROLL):
            j = first + k
            channels = c < tl.where(j < last, C, 0)
            s = t - tl.load(lags + tl.minimum(j, last - 1))
            x = u + b * u_b
            if STACKED:
                x += tl.load(sources + tl.minimum(j, last - 1)).to(tl.int64) * u_n
            inside = ((s >= 0) & (s < L))[:, None] & channels[None, :]
            v = tl.load(values + j * C + c, channels, 0.0).to(WIDE)
            total += tl.load(x + offsets(s, c, u_l, u_c), inside, 0.0).to(WIDE) * v[None, :]
    if GAIN:
        total *= tl.load(gain + n * C + c, c < C, 0.0).to(WIDE)[None, :]
    if SHIFT:
        total += tl.load(shift + n * C + c, c < C, 0.0).to(WIDE)[None, :]
    inside = (t < L)[:, None] & (c < C)[None, :]
    if MIX:
        grad = tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0).to(WIDE)
        total += tl.load(mix + n * C + c, c < C, 0.0).to(WIDE)[None, :] * grad
    if MASKED:
        total = tl.where((t < tl.load(lengths + b))[:, None], total, 0.0)
    if GELU:
        total = gelu_of(total)
    at = y + n.to(tl.int64) * y_n + b * y_b + offsets(t, c, y_l, y_c)
    tl.store(at, total.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["L", "N"])
def _moments_kernel(  # type: ignore[no-untyped-def]
    u, values, lags, starts, lengths, out, C, L, N, u_b, u_c, u_l,
    MASKED: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    sums = out + ((b * tl.num_programs(0) + tl.program_id(0)) * 2 * N) * C
    for i in range(N):
        last = tl.load(starts + i + 1)
        total = tl.zeros([BL, BC], WIDE)
        for first in range(tl.load(starts + i), last, UNROLL):
            for k in tl.static_range(UNROLL):
                j = first + k
                channels = c < tl.where(j < last, C, 0)
                s = t - tl.load(lags + tl.minimum(j, last - 1))
                inside = ((s >= 0) & (s < L))[:, None] & channels[None, :]
                v = tl.load(values + j * C + c, channels, 0.0).to(WIDE)
                total += tl.load(u + b * u_b + offsets(s, c, u_l, u_c), inside, 0.0).to(WIDE) * v[None, :]
        total = tl.where((t < end)[:, None], total, 0.0)
        tl.store(sums + i * C + c, tl.sum(total, 0), c < C)
        tl.store(sums + (N + i) * C + c, tl.sum(total * total, 0), c < C)


@triton.jit(do_not_specialize=["L", "groups", "size"])
def _correlate_kernel(  # type: ignore[no-untyped-def]
    g, u, values, lags, starts, sources, s, q, a, lengths, dc, out, C, L, groups, size,
    g_n, g_b, g_c, g_l, u_b, u_c, u_l, d_n, d_b, d_c, d_l,
    BRANCH: tl.constexpr, STACKED: tl.constexpr, SUM: tl.constexpr, MASKED: tl.constexpr, DENSE: tl.constexpr,
    WIDE: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) % groups
    c = (tl.program_id(0) // groups) % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    part = tl.program_id(0) // groups // tl.cdiv(C, BC)
    spans = tl.cdiv(L, SPAN)
    b = (part // spans).to(tl.int64)
    begin = (part % spans) * SPAN
    j = tl.load(starts + i) + tl.arange(0, BT)
    tap = j < tl.load(starts + i + 1)
    lag = tl.load(lags + j, tap, 0)[None, :, None]
    valid = tap[:, None] & (c < C)[None, :]
    if STACKED:
        g += tl.load(sources + i).to(tl.int64) * g_n
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    if BRANCH:
        v = tl.load(values + j[:, None] * C + c[None, :], valid, 0.0).to(WIDE)[None, :, :]
        gs = tl.load(s + i * C + c, c < C, 0.0).to(WIDE)[None, None, :]
        qs = tl.load(q + i * C + c, c < C, 0.0).to(WIDE)[None, None, :]
        less = tl.load(a + i * C + c, c < C, 0.0).to(WIDE)[None, None, :]
        dc += i.to(tl.int64) * d_n + b * d_b
    real = (c < C)[None, None, :]
    channel = c.to(tl.int64)[None, None, :]
    u += b * u_b
    g += b * g_b
    total = tl.zeros([BL, BT, BC], WIDE)
    mass = tl.zeros([BL, 1, BC], WIDE)
    for start in range(begin, tl.minimum(begin + SPAN, L), BL):
        t = start + tl.arange(0, BL)[:, None, None]
        here = (t < L) & real
        grad = tl.load(g + t.to(tl.int64) * g_l + channel * g_c, here, 0.0).to(WIDE)
        inside = (t >= lag) & (t - lag < L) & tap[None, :, None] & real
        at = t.to(tl.int64) * u_l - lag.to(tl.int64) * u_l + channel * u_c
        if DENSE:  # a thread has 4 channels of every tap: 8 would take too many registers
            at = tl.max_contiguous(at, [1, 1, 4])
        x = tl.load(u + at, inside, 0.0).to(WIDE)
        if BRANCH:
            grad = gs * grad - less - qs * tl.sum(x * v, 1)[:, None, :]
            grad = tl.where(here & (t < end), grad, 0.0)
            tl.store(dc + t.to(tl.int64) * d_l + channel * d_c, grad.to(dc.dtype.element_ty), here)
        if SUM:
            mass += grad
        total += x * grad
    sums = out + part.to(tl.int64) * size * C
    tl.store(sums + j[:, None] * C + c[None, :], tl.sum(total, 0), valid)
    if SUM:
        tl.store(sums + (size - 1) * C + c[None, :], tl.sum(mass, 0), (c < tl.where(i == 0, C, 0))[None, :])


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))


def convolve(
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    y: Tensor,
    sizes: Sequence[int] | None = None,
    sources: Sequence[int] | None = None,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    mix: Tensor | None = None,
    g: Tensor | None = None,
    lengths: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Write gain * sum_j values[j] u[t - lags[j]] + shift + mix * g to y, zero from `lengths` on; values (T, C).

    With `sizes`, y is (N, B, C, L), output n has the next sizes[n] taps, and gain, shift and mix are (N, C). With
    `sources`, u is (N, B, C, L) and tap j is applied to u[sources[j]].
    """
    one, N = (y, 1) if sizes is None else (y[0], len(sizes))
    grid, (_, C, L) = tiles(one, TILE_TIME, TILE_CHANNELS), one.shape
    g = u if g is None else g
    _conv_kernel[(*grid[:2], grid[2] * N)](
        u, values, int32_constants(lags, u), int32_constants(_starts(sizes or [len(lags)]), u),
        int32_constants(sources or [0], u), *(_or_placeholder(x, u) for x in (gain, shift, mix)), g,
        _or_placeholder(lengths, u), y, C, L, N,
        *_strides(u), *_strides(g)[1:], *_strides(y), STACKED=sources is not None, GAIN=gain is not None,
        SHIFT=shift is not None, MIX=mix is not None, MASKED=lengths is not None, GELU=gelu,
        WIDE=wide(values.dtype), BL=TILE_TIME, BC=TILE_CHANNELS, UNROLL=UNROLL,
    )  # fmt: skip
    return y


def _or_placeholder(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of (N, B, C, L); (B, C, L) counts as N = 1."""
    return x.stride() if x.ndim == 4 else (0, *x.stride())


def moments(u: Tensor, values: Tensor, lags: Sequence[int], sizes: Sequence[int], lengths: Tensor | None) -> Tensor:
    """Return partial sums of c_b and of c_b^2, (P, 2, N, C), without storing any output; values (T, C)."""
    grid, (_, C, L), N = tiles(u, TILE_TIME, TILE_CHANNELS), u.shape, len(sizes)
    parts = values.new_empty(grid[0] * grid[2], 2, N, C)
    _moments_kernel[grid](
        u, values, int32_constants(lags, u), int32_constants(_starts(sizes), u), _or_placeholder(lengths, u), parts, C,
        L, N, *u.stride(),
        MASKED=lengths is not None, WIDE=wide(values.dtype), BL=TILE_TIME, BC=TILE_CHANNELS, UNROLL=UNROLL,
    )  # fmt: skip
    return parts


def correlate(g: Tensor, u: Tensor, lags: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return (T + 1, C): the sum of g[t] u[t - lag] over batch and time for each lag, and last the sum of g."""
    parts = partial_sums(u, len(lags) + 1, dtype)
    correlate_groups(g, u, lags, tap_groups(len(lags)) or [0], parts)
    return parts.sum((0, 1))


def tap_groups(taps: int) -> list[int]:
    """Return the sizes of the groups of taps that one program each computes."""
    return [min(GROUP, taps - j) for j in range(0, taps, GROUP)]


def partial_sums(u: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor (B, spans, size, C) for the sums of all programs."""
    B, C, L = u.shape
    return torch.empty(B, triton.cdiv(L, SPAN), size, C, dtype=dtype, device=u.device)


def correlate_groups(
    g: Tensor,
    u: Tensor,
    lags: Sequence[int],
    sizes: Sequence[int],
    parts: Tensor,
    sources: Sequence[int] | None = None,
    branches: tuple[Tensor, ...] | None = None,
    lengths: Tensor | None = None,
    dc: Tensor | None = None,
) -> None:
    """Write the sums of every program, for groups of `sizes` taps, to parts.

    They are sums of g[t] u[t - lag] or, with `sources`, of g[sources[i]][t] u[t - lag] for group i. With `branches`
    (values, s, q, a), every group is one branch with output c; s g - a - q c replaces g and is stored in dc.
    """
    _, C, L = u.shape
    values, s, q, a = branches or (u,) * 4
    dc = u if dc is None else dc
    grid = (len(sizes) * triton.cdiv(C, TILE_CHANNELS) * parts.shape[0] * parts.shape[1],)
    _correlate_kernel[grid](
        g, u, values, int32_constants(lags, u), int32_constants(_starts(sizes), u), int32_constants(sources or [0], u),
        s, q, a, _or_placeholder(lengths, u), dc, parts, C, L, len(sizes), parts.shape[2],
        *_strides(g), *u.stride(), *_strides(dc), BRANCH=branches is not None, STACKED=sources is not None,
        SUM=branches is None and sources is None, MASKED=lengths is not None, DENSE=u.stride(1) == 1,
        WIDE=wide(parts.dtype), SPAN=SPAN, BL=STEP, BC=TILE_CHANNELS, BT=max(GROUP, triton.next_power_of_2(max(sizes))),
    )  # fmt: skip
