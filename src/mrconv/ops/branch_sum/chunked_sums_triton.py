"""Cumulative sums relative to chunks, for moving sums that are accurate in float32 at any length; by Triton.

The cumulative sum S of u over time is stored in two parts, for chunks of BL positions and for CP channels, a multiple
of PADDING: `local` (B, chunks, BL, CP) holds the cumulative sums P within each chunk, and `table` (B, chunks, 5, CP)
the rows BASE, the sum of all earlier chunks; ERROR, its rounding error; TOTAL, the sum of the chunk; AREA and ENERGY,
the sums of P and of P^2. The rounding errors of P grow with BL.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import narrow, offsets, tiles, widen

CHUNK, HALF_CHUNK = 64, 128  # positions, for float32 and float64, and for half precision
BLOCK = 32  # chunks that one program sums at a time
PADDING = 32
BASE, ERROR, TOTAL, AREA, ENERGY = (tl.constexpr(row) for row in range(5))


@triton.jit
def to(x, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast x to float32 or float64; half precision is cast to float32 first, as Triton's interpreter requires."""
    return x.to(tl.float32).to(wide) if x.dtype != tl.float64 else x


@triton.jit
def _local_kernel(  # type: ignore[no-untyped-def]
    u, local, table, totals, C, L, u_b, u_c, u_l,
    CP: tl.constexpr, SCAN: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the cumulative sums within a chunk of u, their sum and sum of squares, and the chunk's total."""
    j = tl.arange(0, BL)
    t = tl.program_id(0) * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    chunk = b * tl.num_programs(0) + tl.program_id(0)
    inside = (t < L)[:, None] & (c < C)[None, :]
    v = to(tl.load(u + b * u_b + offsets(t, c, u_l, u_c), inside, 0.0), SCAN)
    rounded = narrow(tl.cumsum(v, 0), local)
    tl.store(local + chunk * BL * CP + (j[:, None] * CP + c[None, :]), rounded)
    tl.store(totals + chunk * CP + c, tl.sum(v, 0).to(tl.float64))
    s = to(rounded, SCAN)
    tl.store(table + (chunk * 5 + AREA) * CP + c, narrow(tl.sum(s, 0), table))
    tl.store(table + (chunk * 5 + ENERGY) * CP + c, narrow(tl.sum(s * s, 0), table))


@triton.jit(do_not_specialize=["chunks"])
def _base_kernel(totals, table, chunks, CP: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sum of all earlier chunks, rounded, its rounding error, and the chunk's own total."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    b = tl.program_id(1).to(tl.int64)
    carry = tl.zeros([BC], tl.float64)
    for start in range(0, chunks, BK):
        k = start + tl.arange(0, BK)
        inside = (k < chunks)[:, None]
        v = tl.load(totals + b * chunks * CP + offsets(k, c, CP, 1), inside, 0.0)
        s = tl.cumsum(v, 0) - v + carry[None, :]
        out = table + b * chunks * 5 * CP + offsets(k, c, 5 * CP, 1)
        rounded = narrow(s, table)
        tl.store(out + BASE * CP, rounded, inside)
        tl.store(out + ERROR * CP, narrow(s - widen(rounded), table), inside)
        tl.store(out + TOTAL * CP, narrow(v, table), inside)
        carry += tl.sum(v, 0)


@triton.jit
def entry(table, k, row: tl.constexpr, c, chunks, CP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return an entry of chunk k in the table, 0 for a chunk that does not exist."""
    return tl.load(table + (k * 5 + row) * CP + c, c < tl.where((k >= 0) & (k < chunks), CP, 0), 0.0)


@triton.jit
def base_step(table, k, other, c, chunks, CP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return S before chunk k less S before the other chunk."""
    rounded = entry(table, k, BASE, c, chunks, CP) - entry(table, other, BASE, c, chunks, CP)
    return rounded + (entry(table, k, ERROR, c, chunks, CP) - entry(table, other, ERROR, c, chunks, CP))


class ChunkedSums:
    """The cumulative sum of u (B, C, L), as `local` and `table`, in `dtype`."""

    def __init__(self, u: Tensor, dtype: torch.dtype) -> None:
        (B, C, L), half = u.shape, u.element_size() == 2
        self.BL, self.BK = HALF_CHUNK if half else CHUNK, BLOCK
        self.chunks, padded, _ = tiles(u, self.BL, PADDING)
        self.CP = CP = PADDING * padded
        self.local = u.new_empty(B, self.chunks, self.BL, CP, dtype=dtype)
        self.table = u.new_empty(B, self.chunks, 5, CP, dtype=dtype)
        totals = u.new_empty(B, self.chunks, CP, dtype=torch.float64)
        channels = 16 if half else 32
        _local_kernel[self.chunks, CP // channels, B](
            u, self.local, self.table, totals, C, L, *u.stride(), CP=CP,
            SCAN=tl.float32 if half else tl.float64, BL=self.BL, BC=channels, num_warps=1,
        )  # fmt: skip
        _base_kernel[padded, B](totals, self.table, self.chunks, CP=CP, BK=BLOCK, BC=PADDING)
