"""The Triton kernels behind `taps.py`. Tensors are (B, C, L) with any strides; a program does a tile of (L, C)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from ..triton_tools import branch_gradients, offsets, on_device, tiles, wide
from ..triton_tools import gelu as gelu_of

ROWS, COLUMNS = 128, 32  # of a tile of outputs: positions, channels
UNROLL = 4  # taps whose inputs a program loads at a time
SPAN, STEP = 512, 16  # positions of a program that adds up taps' gradients, and those of one step of it
GROUP, LARGEST = 8, 16  # taps of such a program, and the most that still fit its registers: powers of 2
SCRATCH = 256 * 2**20  # bytes for the gradients of branches' outputs, as far as a batch can be cut into slices


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
            own = c < tl.where(j < last, C, 0)
            s = t - tl.load(lags + tl.minimum(j, last - 1))
            x = u + b * u_b
            if STACKED:
                x += tl.load(sources + tl.minimum(j, last - 1)).to(tl.int64) * u_n
            inside = ((s >= 0) & (s < L))[:, None] & own[None, :]
            v = tl.load(values + j * C + c, own, 0.0).to(WIDE)
            total += tl.load(x + offsets(s, c, u_l, u_c), inside, 0.0).to(WIDE) * v[None, :]
    if GAIN:
        total *= tl.load(gain + n * C + c, c < C, 0.0).to(WIDE)[None, :]
    if SHIFT:
        total += tl.load(shift + n * C + c, c < C, 0.0).to(WIDE)[None, :]
    inside = (t < L)[:, None] & (c < C)[None, :]
    if MIX:
        pull = tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0).to(WIDE)
        total += tl.load(mix + n * C + c, c < C, 0.0).to(WIDE)[None, :] * pull
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
    row = out + ((b * tl.num_programs(0) + tl.program_id(0)) * 2 * N) * C
    for i in range(N):
        last = tl.load(starts + i + 1)
        total = tl.zeros([BL, BC], WIDE)
        for first in range(tl.load(starts + i), last, UNROLL):
            for k in tl.static_range(UNROLL):
                j = first + k
                own = c < tl.where(j < last, C, 0)
                s = t - tl.load(lags + tl.minimum(j, last - 1))
                inside = ((s >= 0) & (s < L))[:, None] & own[None, :]
                v = tl.load(values + j * C + c, own, 0.0).to(WIDE)
                total += tl.load(u + b * u_b + offsets(s, c, u_l, u_c), inside, 0.0).to(WIDE) * v[None, :]
        total = tl.where((t < end)[:, None], total, 0.0)
        tl.store(row + i * C + c, tl.sum(total, 0), c < C)
        tl.store(row + (N + i) * C + c, tl.sum(total * total, 0), c < C)


@triton.jit(do_not_specialize=["L", "groups", "rows"])
def _correlate_kernel(  # type: ignore[no-untyped-def]
    g, u, values, lags, starts, sources, s, q, a, lengths, dc, out, C, L, groups, rows,
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
    own = tap[:, None] & (c < C)[None, :]
    if STACKED:
        g += tl.load(sources + i).to(tl.int64) * g_n
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    if BRANCH:
        v = tl.load(values + j[:, None] * C + c[None, :], own, 0.0).to(WIDE)[None, :, :]
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
        pull = tl.load(g + t.to(tl.int64) * g_l + channel * g_c, here, 0.0).to(WIDE)
        inside = (t >= lag) & (t - lag < L) & tap[None, :, None] & real
        at = t.to(tl.int64) * u_l - lag.to(tl.int64) * u_l + channel * u_c
        if DENSE:  # a thread has 4 channels of every tap: 8 would take too many registers
            at = tl.max_contiguous(at, [1, 1, 4])
        x = tl.load(u + at, inside, 0.0).to(WIDE)
        if BRANCH:
            pull = gs * pull - less - qs * tl.sum(x * v, 1)[:, None, :]
            pull = tl.where(here & (t < end), pull, 0.0)
            tl.store(dc + t.to(tl.int64) * d_l + channel * d_c, pull.to(dc.dtype.element_ty), here)
        if SUM:
            mass += pull
        total += x * pull
    row = out + part.to(tl.int64) * rows * C
    tl.store(row + j[:, None] * C + c[None, :], tl.sum(total, 0), own)
    if SUM:
        tl.store(row + (rows - 1) * C + c[None, :], tl.sum(mass, 0), (c < tl.where(i == 0, C, 0))[None, :])


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
    `sources`, u is (N, B, C, L) and tap j acts on u[sources[j]].
    """
    one, N = (y, 1) if sizes is None else (y[0], len(sizes))
    grid, (_, C, L) = tiles(one, ROWS, COLUMNS), one.shape
    g = u if g is None else g
    _conv_kernel[(*grid[:2], grid[2] * N)](
        u, values, on_device(lags, u), on_device(_starts(sizes or [len(lags)]), u), on_device(sources or [0], u),
        _or(gain, u), _or(shift, u), _or(mix, u), g, _or(lengths, u), y, C, L, N,
        *_strides(u), *_strides(g)[1:], *_strides(y), STACKED=sources is not None, GAIN=gain is not None,
        SHIFT=shift is not None, MIX=mix is not None, MASKED=lengths is not None, GELU=gelu,
        WIDE=wide(values.dtype), BL=ROWS, BC=COLUMNS, UNROLL=UNROLL,
    )  # fmt: skip
    return y


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of (N, B, C, L), or of (B, C, L) as one of those."""
    return x.stride() if x.ndim == 4 else (0, *x.stride())


def moments(u: Tensor, values: Tensor, lags: Sequence[int], sizes: Sequence[int], lengths: Tensor | None) -> Tensor:
    """Sum and sum of squares of every branch's output, (2, N, C); no output is written. values (T, C)."""
    grid, (_, C, L), N = tiles(u, ROWS, COLUMNS), u.shape, len(sizes)
    parts = values.new_empty(grid[0] * grid[2], 2, N, C)
    _moments_kernel[grid](
        u, values, on_device(lags, u), on_device(_starts(sizes), u), _or(lengths, u), parts, C, L, N, *u.stride(),
        MASKED=lengths is not None, WIDE=wide(values.dtype), BL=ROWS, BC=COLUMNS, UNROLL=UNROLL,
    )  # fmt: skip
    return parts.sum(0)


def correlate(g: Tensor, u: Tensor, lags: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Sum over batch and time of g[t] u[t - lag] for each lag, and in the last row that of g: (T + 1, C)."""
    parts = _parts(u, len(lags) + 1, dtype)
    _correlate(g, u, lags, _cut(len(lags)) or [0], parts)
    return parts.sum((0, 1))


def _cut(taps: int) -> list[int]:
    """Return the sizes of the groups that so many taps make."""
    return [min(GROUP, taps - j) for j in range(0, taps, GROUP)]


def _parts(u: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return room for the sums of all programs."""
    B, C, L = u.shape
    return torch.empty(B, triton.cdiv(L, SPAN), rows, C, dtype=dtype, device=u.device)


def _correlate(
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
    """Write each program's sums for groups of `sizes` taps to parts.

    They are of g[t] u[t - lag], or of g[sources[i]] for group i, or, if `branches` (values, s, q, a) are given, of
    s g - a - q c with c the output of the branch that the group is, which is then written to dc.
    """
    _, C, L = u.shape
    values, s, q, a = branches or (u,) * 4
    dc = u if dc is None else dc
    grid = (len(sizes) * triton.cdiv(C, COLUMNS) * parts.shape[0] * parts.shape[1],)
    _correlate_kernel[grid](
        g, u, values, on_device(lags, u), on_device(_starts(sizes), u), on_device(sources or [0], u), s, q, a,
        _or(lengths, u), dc, parts, C, L, len(sizes), parts.shape[2],
        *_strides(g), *u.stride(), *_strides(dc), BRANCH=branches is not None, STACKED=sources is not None,
        SUM=branches is None and sources is None, MASKED=lengths is not None, DENSE=u.stride(1) == 1,
        WIDE=wide(parts.dtype), SPAN=SPAN, BL=STEP, BC=COLUMNS, BT=max(GROUP, triton.next_power_of_2(max(sizes))),
    )  # fmt: skip


def pull_back(
    g: Tensor,
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    sizes: Sequence[int],
    s: Tensor,
    q: Tensor,
    a: Tensor,
    skip: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of u, and of values (T, C), from those of the branches' outputs, s g - a - q c, and skip * g."""
    s, q, a = s.contiguous(), q.contiguous(), a.contiguous()
    scratch = branch_gradients(u, len(sizes), SCRATCH, values.dtype)
    size = scratch.shape[1]
    du, parts = torch.empty_like(u), _parts(u, len(lags), values.dtype)
    owners = [i for i, n in enumerate(sizes) for _ in range(n)]
    groups = [(i, n) for i, own in enumerate(sizes) for n in _cut(own)]
    back = [-lag for lag in lags]
    slices = zip(*(x.split(size) for x in (u, g, du, parts)), strict=True)
    for i, (x, pull, target, sums) in enumerate(slices):
        dc = scratch[:, : x.shape[0]]
        end = None if lengths is None else lengths[i * size : i * size + size]
        if max(sizes) <= LARGEST:
            _correlate(pull, x, lags, sizes, sums, None, (values, s, q, a), end, dc)
        else:
            convolve(x, values, lags, dc, sizes, None, -q, -a, s, pull, end)
            _correlate(dc, x, lags, [n for _, n in groups], sums, [owner for owner, _ in groups])
        convolve(dc, values, back, target, None, owners, mix=skip, g=pull)
    return du, parts.sum((0, 1))
