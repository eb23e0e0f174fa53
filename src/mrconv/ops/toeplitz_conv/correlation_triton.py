"""Correlations of sequences as products of matrices on the tensor cores; by Triton.

A correlation of u with a signal g is made of squares of time: for squares p and p + d, the sum over p and all sequences
of u[p, i] g[p + d, j] is a matrix whose diagonal j - i = e belongs to lag d SQUARE + e. A lag has two diagonals: e of
distance d, and e - SQUARE of distance d + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

import triton

from .._common import INTERPRETED, cached_on_device

SQUARE = 64  # positions along each side of the products that are summed along diagonals
CORRELATE = {"STAGES": 3, "num_warps": 4}


@dataclass(frozen=True)
class Correlations:
    """Distances of squares whose products give the correlations of the input with several signals."""

    pairs: Tensor  # (pairs, 3): signal, distance of squares, position of the result; the largest sums first
    table: Tensor  # (signals, 3): position of the first result, the first and the last distance


def _distances(low: int, high: int, squares: int) -> tuple[int, int]:
    """Return the first and the last distance of squares that lags low .. high need."""
    return max(low // SQUARE, 1 - squares), min(-(-high // SQUARE), squares - 1)


def correlations(lags: Sequence[tuple[int, int]], squares: int, device: torch.device) -> Correlations:
    """Return the correlations at lags (lowest, highest) of each signal, for inputs of so many squares."""
    return _correlations([_distances(low, high, squares) for low, high in lags], device)


def _correlations(distances: Sequence[tuple[int, int]], device: torch.device) -> Correlations:
    pairs: list[tuple[int, int, int]] = []
    table = []
    for n, (first, last) in enumerate(distances):
        table.append((len(pairs), first, last))
        pairs += [(n, d, len(pairs) + d - first) for d in range(first, last + 1)]
    return Correlations(int_table(sorted(pairs, key=lambda pair: abs(pair[1])), 3, device), int_table(table, 3, device))


def int_table(numbers: Sequence[Sequence[int]], columns: int, device: torch.device) -> Tensor:
    """Return rows of int32 numbers that a kernel reads."""
    return torch.tensor(numbers, dtype=torch.int32, device=device).reshape(len(numbers), columns)


@triton.jit(do_not_specialize=["C", "B", "time", "squares", "pairs"])
def _correlate_kernel(  # type: ignore[no-untyped-def]
    x, signals, which, out, C, B, time, squares, pairs,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the sums along the diagonals of the products of squares, for a channel, a signal and a distance."""
    c = (tl.program_id(0) // pairs).to(tl.int64)
    which += 3 * (tl.program_id(0) % pairs)
    n = tl.load(which)
    d = tl.load(which + 1)
    i = tl.arange(0, BLOCK)
    mine = x + c * B * time * 16
    there = signals + (c + n * C) * B * time * 16 + d * BLOCK
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, B, LINES):
        b = start + tl.arange(0, LINES)
        at = (b * (time * 16) + tl.maximum(0, -d) * BLOCK)[:, None] + i[None, :]
        here, far = mine + at, there + at
        for _ in tl.range(0, squares - tl.abs(d), num_stages=STAGES):
            v = tl.load(here, (b < B)[:, None], 0.0)
            w = tl.load(far, (b < B)[:, None], 0.0)
            if WIDE:
                v, w = v.to(tl.float32), w.to(tl.float32)
            total = tl.dot(tl.trans(v), w, total, input_precision=PRECISION)
            here += BLOCK
            far += BLOCK
    column = i[:, None] + i[None, :]
    turned = tl.gather(total, column % BLOCK, 1)  # column e holds the diagonals e and e - BLOCK
    out += (c * pairs + tl.load(which + 2)) * 2 * BLOCK + i
    tl.store(out, tl.sum(tl.where(column < BLOCK, 0.0, turned), 0))
    tl.store(out + BLOCK, tl.sum(tl.where(column < BLOCK, turned, 0.0), 0))


@triton.jit
def correlation(diagonals, table, lag, inside, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the correlations of a signal at some lags: sums of two diagonals each."""
    first = tl.load(table + 1)
    last = tl.load(table + 2)
    e = lag & (BLOCK - 1)
    d = (lag - e) // BLOCK
    at = diagonals + (tl.load(table) + d - first) * 2 * BLOCK + e
    near = tl.load(at + BLOCK, inside & (d >= first) & (d <= last), 0.0)
    return near + tl.load(at + 2 * BLOCK, inside & (d + 1 >= first) & (d + 1 <= last), 0.0)


def correlate(x: Tensor, signals: Tensor, of: Correlations) -> Tensor:
    """Return the diagonals (C, numbers) of the correlations of x (C, B, time) with signals (signals, C, B, time)."""
    C, B, time = x.shape
    out = x.new_empty(C, len(of.pairs) * 2 * SQUARE, dtype=torch.float32)
    _correlate_kernel[(C * len(of.pairs),)](
        x, signals, of.pairs, out, C, B, time // 16, time // SQUARE, len(of.pairs),
        WIDE=INTERPRETED, PRECISION="ieee" if INTERPRETED else "tf32", BLOCK=SQUARE,
        LINES=min(64, max(16, triton.next_power_of_2(max(1, B)))), **CORRELATE,
    )  # fmt: skip
    return out


@cached_on_device(maxsize=1024)
def _at_distances(first: int, last: int, device: torch.device) -> Correlations:
    return _correlations([(first, last)], device)


def correlation_at(x: Tensor, g: Tensor, low: int, high: int) -> Tensor:
    """Return sum_t x[t] g[t + lag] for the lags low .. high, (C, lags) in float32; x and g are (C, B, time)."""
    first, last = _distances(low, high, x.shape[2] // SQUARE)
    diagonals = correlate(x, g[None], _at_distances(first, last, x.device)).view(len(x), -1, 2, SQUARE)
    before, here = diagonals.unbind(2)
    sums = (pad(here, (0, 0, 1, 0)) + pad(before, (0, 0, 0, 1))).flatten(1)
    start = low - (first - 1) * SQUARE  # the sums begin one distance before the first
    return sums[:, start : start + high - low + 1]
