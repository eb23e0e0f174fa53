"""Correlations of batches over time as products of matrices on the tensor cores: what `products.py` is made of.

Time is cut into blocks. For one channel and one distance d of blocks, a program multiplies all pairs of blocks that lie
d apart, of all sequences, into one matrix [block, block]; lags are its diagonals, which a second kernel adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

import triton

from .backends import INTERPRETED


class Tile(NamedTuple):
    """What one program does: products of [BLOCK, rows] and [rows, BLOCK], added up over the pairs of blocks."""

    rows: int
    warps: int
    stages: int


BLOCK = 64
TILE = Tile(64, 4, 3)
TILE_FLOAT32 = Tile(32, 4, 2)


@triton.jit(do_not_specialize=["B", "blocks", "first"])
def _blocks_kernel(  # type: ignore[no-untyped-def]
    p, q, matrices, B, blocks, first, p_b, p_c, q_b, q_c,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write sum_b,i p[b, i + d]^T q[b, i] of one channel and one distance d, over the blocks i that have both."""
    c = tl.program_id(0).to(tl.int64)
    d = first + tl.program_id(1)
    earliest = tl.maximum(0, -d)
    pairs = tl.maximum(0, blocks - tl.abs(d)) * B
    a = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in tl.range(0, pairs, ROWS, num_stages=STAGES):
        k = start + tl.arange(0, ROWS)
        i = earliest + k // B
        b = (k % B).to(tl.int64)
        there = (k < pairs)[:, None]
        left = tl.load(p + c * p_c + (b * p_b + (i + d) * BLOCK)[:, None] + a[None, :], there, 0.0)
        right = tl.load(q + c * q_c + (b * q_b + i * BLOCK)[:, None] + a[None, :], there, 0.0)
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    place = (c * tl.num_programs(1) + tl.program_id(1)) * BLOCK * BLOCK
    tl.store(matrices + place + (a * BLOCK)[:, None] + a[None, :], total)


@triton.jit
def _diagonals_kernel(matrices, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up a block of lags of one channel: diagonals a - a' = r of one matrix, and r - BLOCK of the next."""
    c = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    r = tl.arange(0, BLOCK)
    here = matrices + (c * (tl.num_programs(1) + 1) + j) * BLOCK * BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for a in range(BLOCK):
        after = tl.where(a < r, 1, 0)  # in the next matrix
        total += tl.load(here + after * (BLOCK * BLOCK + BLOCK) + a * BLOCK + a - r)
    tl.store(out + (c * tl.num_programs(1) + j) * BLOCK + r, total)


def correlation(p: Tensor, q: Tensor, low: int, high: int) -> Tensor:
    """Return sum_b,t p[b, t] q[b, t - lag] at lags low .. high - 1, (C, high - low) in float32.

    p and q are (B, C, T), contiguous in time, T a multiple of BLOCK, and zero outside.
    """
    B, C, T = p.shape
    tile = TILE_FLOAT32 if p.dtype == torch.float32 else TILE
    first, last = low // BLOCK, (high - 1) // BLOCK + 1
    matrices = p.new_empty(C, last - first + 1, BLOCK, BLOCK, dtype=torch.float32)
    precision = "tf32x3" if p.dtype == torch.float32 else "tf32"
    _blocks_kernel[(C, last - first + 1)](
        p, q, matrices, B, T // BLOCK, first, *p.stride()[:2], *q.stride()[:2], WIDE=INTERPRETED,
        PRECISION="ieee" if INTERPRETED else precision, BLOCK=BLOCK, ROWS=tile.rows, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    out = p.new_empty(C, (last - first) * BLOCK, dtype=torch.float32)
    _diagonals_kernel[(C, last - first)](matrices, out, BLOCK=BLOCK, num_warps=2)
    return out[:, low - first * BLOCK : high - first * BLOCK]
