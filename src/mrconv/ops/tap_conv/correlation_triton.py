"""Triton kernel for sums of products of a sequence with shifts of another one; tensors are (B, C, L), any strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import constants
from .._triton import cast, int32_constants, offsets, wide
from .triton_kernels import is_dense, load_tile

STEP, STEP_CHANNELS = 16, 64  # of a tile
GROUP, REPEAT = 6, 2  # lags per program, and tiles per iteration
WARPS, REGISTERS = 4, 168  # 3 programs of 4 warps with at most 168 registers fit on a multiprocessor
MAX_PARTS = 32  # partial sums over the batch


@triton.jit
def _append(items, item):  # type: ignore[no-untyped-def]
    """Return a tuple with one more item; static loops keep tiles in tuples."""
    return items + (item,)  # noqa: RUF005


@triton.jit
def _add_products(  # type: ignore[no-untyped-def]
    totals, mass, g, u, g_l, u_l, lags, shifts, channels, begin, stop, L,
    GROUP: tl.constexpr, REPEAT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Add the products of tiles of g and of shifted tiles of u at positions from `begin` to `stop`.

    An iteration adds REPEAT tiles. Tiles that other iterations have not loaded yet, of g and of u at the smallest lag,
    are loaded an iteration ahead, because they come from far.
    """
    g += tl.cast(begin, tl.int64) * g_l
    u += tl.cast(begin, tl.int64) * u_l
    t = begin + tl.arange(0, BL)
    next_g = ()
    next_u = ()
    for i in tl.static_range(REPEAT):
        s = t + i * BL
        inside = (s < stop) & (s >= lags[0]) & (s - lags[0] < L)
        next_g = _append(next_g, load_tile(g + i * BL * g_l, s < stop, channels, True, EVEN))
        next_u = _append(next_u, load_tile(u + i * BL * u_l - shifts[0], inside, channels, True, EVEN))
    for start in range(begin, stop, REPEAT * BL):
        t = start + tl.arange(0, BL)
        this_g = next_g
        this_u = next_u
        next_g = ()
        next_u = ()
        for i in tl.static_range(REPEAT):
            s = t + (REPEAT + i) * BL
            inside = (s < stop) & (s >= lags[0]) & (s - lags[0] < L)
            next_g = _append(next_g, load_tile(g + (REPEAT + i) * BL * g_l, s < stop, channels, True, EVEN))
            far = u + (REPEAT + i) * BL * u_l - shifts[0]
            next_u = _append(next_u, load_tile(far, inside, channels, True, EVEN))
        for i in tl.static_range(REPEAT):
            grad = cast(this_g[i], WIDE)
            mass += grad
            sums = _append((), totals[0] + grad * cast(this_u[i], WIDE))
            for k in tl.static_range(1, GROUP):
                s = t + i * BL
                inside = (s < stop) & (s >= lags[k]) & (s - lags[k] < L)
                shifted = load_tile(u + i * BL * u_l - shifts[k], inside, channels, MASKED, EVEN)
                sums = _append(sums, totals[k] + grad * cast(shifted, WIDE))
            totals = sums
        g += REPEAT * BL * g_l
        u += REPEAT * BL * u_l
    return totals, mass


@triton.jit(do_not_specialize=["B", "L", "jobs", "share", "part_stride"])
def _correlate_kernel(  # type: ignore[no-untyped-def]
    g, u, lags, begins, stops, sources, lengths, out, B, L, jobs, share, part_stride, g_b, g_c, g_l, u_b, u_c, u_l,
    C: tl.constexpr, DENSE: tl.constexpr, GROUP: tl.constexpr, REPEAT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    if DENSE:  # constants save instructions
        g_c, g_l, u_c, u_l = 1, C, 1, C
    job = tl.program_id(0) % jobs
    c = tl.program_id(0) // jobs % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    part = tl.program_id(0) // jobs // tl.cdiv(C, BC)
    at = ()
    shifts = ()
    totals = ()
    for k in tl.static_range(GROUP):
        lag = tl.load(lags + job * GROUP + k)
        at = _append(at, lag)
        shifts = _append(shifts, lag.to(tl.int64) * u_l)
        totals = _append(totals, tl.zeros([BL, BC], WIDE))
    mass = tl.zeros([BL, BC], WIDE)
    low, high = tl.load(lags + job * GROUP), tl.load(lags + job * GROUP + GROUP - 1)
    first, last = tl.load(begins + job), tl.load(stops + job)
    k = tl.arange(0, BL)
    g_at, u_at = offsets(tl.load(sources + job) + k, c, g_l, g_c), offsets(k, c, u_l, u_c)
    for b in range(part * share, tl.minimum(part * share + share, B)):
        end = L
        if MASKED:
            end = tl.load(lengths + b).to(tl.int32)
        begin = tl.maximum(tl.where(first < 0, first + end, first), tl.maximum(low, 0))
        stop = tl.minimum(tl.where(last <= 0, last + end, tl.minimum(last, end)), L + high)
        step = BL * REPEAT
        inner = begin + tl.cdiv(tl.maximum(high - begin, 0), step) * step  # from here to `outer` all tiles are inside
        inner = tl.maximum(tl.minimum(inner, stop), begin)
        outer = inner + tl.maximum(tl.minimum(stop, L + low) - inner, 0) // step * step
        x, grad = u + tl.cast(b, tl.int64) * u_b + u_at, g + tl.cast(b, tl.int64) * g_b + g_at
        totals, mass = _add_products(
            totals, mass, grad, x, g_l, u_l, at, shifts, c < C, begin, inner, L, GROUP, REPEAT, True, EVEN, WIDE, BL
        )  # fmt: skip
        totals, mass = _add_products(
            totals, mass, grad, x, g_l, u_l, at, shifts, c < C, inner, outer, L, GROUP, REPEAT, False, EVEN, WIDE, BL
        )  # fmt: skip
        totals, mass = _add_products(
            totals, mass, grad, x, g_l, u_l, at, shifts, c < C, outer, stop, L, GROUP, REPEAT, True, EVEN, WIDE, BL
        )  # fmt: skip
    out += part.to(tl.int64) * part_stride + job * (GROUP + 1) * C + c
    for i in tl.static_range(GROUP):
        tl.store(out + i * C, tl.sum(totals[i], 0), c < C)
    tl.store(out + GROUP * C, tl.sum(mass, 0), c < C)


class Correlations(NamedTuple):
    """Sums of g[source + t] u[t - lag] at ascending lags, and of g[source + t], over begin <= t < stop.

    A negative `begin` and a `stop` that is not positive count from the end of the sequence. The sum of g leaves out
    positions at which no lag reaches u; with lag 0 there are none.
    """

    lags: tuple[int, ...]
    begin: int = 0
    stop: int = 0
    source: int = 0


class SplitCorrelations:
    """Correlations in pieces of at most GROUP lags, which one program each computes, and the rows of their sums.

    Every piece has GROUP + 1 rows, from `first_row` on: one for each lag, then the sum of g.
    """

    def __init__(self, correlations: Sequence[Correlations], first_row: int = 0) -> None:
        self._correlations, self._first_row = correlations, first_row
        self._first, self.pieces = list[int](), list[Correlations]()
        for lags, *rest in correlations:
            self._first.append(len(self.pieces))
            groups = (lags[k : k + GROUP] for k in range(0, len(lags), GROUP))
            self.pieces += [Correlations((*at, *at[-1:] * (GROUP - len(at))), *rest) for at in groups]

    @property
    def rows(self) -> int:
        """The number of rows of sums."""
        return len(self.pieces) * (GROUP + 1)

    def row(self, index: int, lag: int) -> int:
        """Return the row with the sum of g[t] u[t - lag] of a correlation."""
        k = self._correlations[index].lags.index(lag)
        return self._first_row + (self._first[index] + k // GROUP) * (GROUP + 1) + k % GROUP

    def sum_row(self, index: int) -> int:
        """Return the row with the sum of g[t] of a correlation that has lag 0."""
        k = self._correlations[index].lags.index(0)
        return self._first_row + (self._first[index] + k // GROUP) * (GROUP + 1) + GROUP


def correlate_parts(
    g: Tensor, u: Tensor, correlations: SplitCorrelations, parts: Tensor, lengths: Tensor | None = None
) -> None:
    """Write the sums of correlations, for parts of the batch, to parts (P, rows, C)."""
    pieces, (B, C, L) = correlations.pieces, u.shape
    lags, *places = zip(*pieces, strict=True)
    tables = [lag for group in lags for lag in group], *places
    _correlate_kernel[(len(pieces) * triton.cdiv(C, STEP_CHANNELS) * parts.shape[0],)](
        g, u, *(int32_constants(table, u) for table in tables), u if lengths is None else lengths, parts,
        B, L, len(pieces), triton.cdiv(B, parts.shape[0]), parts.stride(0), *g.stride(), *u.stride(), C=C,
        DENSE=is_dense(g, u), GROUP=GROUP, REPEAT=REPEAT,
        MASKED=lengths is not None, EVEN=C % STEP_CHANNELS == 0, WIDE=wide(parts.dtype), BL=STEP, BC=STEP_CHANNELS,
        num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip


def correlate(g: Tensor, u: Tensor, lags: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return (T, C): the sum of g[t] u[t - lag] over batch and time for each lag."""
    correlations = SplitCorrelations([Correlations(tuple(sorted(lags)))])
    parts = partial_sums(u, correlations.rows, dtype)
    correlate_parts(g, u, correlations, parts)
    return parts.sum(0).index_select(0, constants([correlations.row(0, lag) for lag in lags], parts))


def partial_sums(u: Tensor, rows: int, dtype: torch.dtype, parts: int | None = None) -> Tensor:
    """Return an uninitialised tensor (P, rows, C) for sums over P parts of the batch, at most `parts` or MAX_PARTS."""
    B, C, _ = u.shape
    share = max(1, triton.cdiv(B, MAX_PARTS if parts is None else parts))
    return torch.empty(max(1, triton.cdiv(B, share)), rows, C, dtype=dtype, device=u.device)
