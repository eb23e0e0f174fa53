"""Short branches of `toeplitz_branch_sum`: their statistics and gradients come from matrices of a kernel's size.

The energy of a branch c = k * u is k' R k, R[i, j] being the sum over batch and time of u[t - i] u[t - j]. That is the
input's autocorrelation at i - j, but for outputs beyond an edge of the input, which do not count: a running sum along
the diagonals of y' y, where y are the input's values next to the edge, is taken off. Gradients are 2 R k and, for the
input, its convolution with the kernels' autocorrelations less, next to the edge, a running sum of that kind over k' k.

Branches that look back meet the end of each sequence, y[n] = u[length - n] and y[0] = 0; those that look ahead the
start, y[n] = u[n]. What is added and taken off again may be much larger than what is left, so none of it is rounded to
the input's dtype, nor multiplied in TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

import triton

from ..backends import INTERPRETED
from .statistics import running_total

SEQUENCES, DIAGONALS, TAPS = 16, 32, 512  # of a program


@triton.jit
def _edge(x, lengths, c, b, B, L, units, ahead, MASKED: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where in rows x (C, B, time) sequences b have their N values next to an edge, and if they are there.

    `ahead` is 0 for the end of the sequences, 1 for their start.
    """
    n = tl.arange(0, N)[None, :]
    length = tl.load(lengths + b, b < B, 0).to(tl.int32)[:, None] if MASKED else L
    place = tl.where(ahead != 0, n, length - n)
    return (c * B + b)[:, None] * units * 16 + place, (b < B)[:, None] & (place >= 0) & (place < length)


@triton.jit(do_not_specialize=["B", "L", "units", "first"])
def _gram_kernel(  # type: ignore[no-untyped-def]
    x, lengths, grams, sums, B, L, units, first,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Store y' y and the sums of y over all sequences, for the edges y of one channel and way."""
    c = tl.program_id(0).to(tl.int64)
    total = tl.zeros([N, N], tl.float32)
    added = tl.zeros([N], tl.float32)
    for start in range(0, B, BB):
        at, inside = _edge(
            x, lengths, c, start + tl.arange(0, BB), B, L, units, first + tl.program_id(1), MASKED, N
        )  # fmt: skip
        y = tl.load(x + at, inside, 0.0)
        added += tl.sum(y.to(tl.float32), 0)
        if WIDE:
            y = y.to(tl.float32)
        total = tl.dot(tl.trans(y), y, total, input_precision=PRECISION)
    n = tl.arange(0, N)
    own = c * tl.num_programs(1) + tl.program_id(1)
    tl.store(grams + own * N * N + n[:, None] * N + n[None, :], total)
    tl.store(sums + own * N + n, added)


@triton.jit(do_not_specialize=["B", "L", "units", "ways", "way", "first"])
def _add_edges_kernel(  # type: ignore[no-untyped-def]
    x, lengths, matrices, shift, out, B, L, units, ways, way, first,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Add to edges of rows `out` those of x times a matrix, and a shift."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    n = tl.arange(0, N)
    at, inside = _edge(x, lengths, c, b, B, L, units, first + way, MASKED, N)
    y = tl.load(x + at, inside, 0.0).to(tl.float32)
    matrix = tl.load(matrices + (c * ways + way) * N * N + n[:, None] * N + n[None, :])
    total = tl.dot(y, matrix, input_precision=PRECISION) + tl.load(shift + (c * ways + way) * N + n)[None, :]
    tl.store(out + at, total + tl.load(out + at, inside, 0.0), inside)


@triton.jit(do_not_specialize=["C", "nb", "count", "taps", "row"])
def _gradient_kernel(  # type: ignore[no-untyped-def]
    numbers, cross, derivatives, which, owners, out, C, nb, count, taps, row, BL: tl.constexpr,
):  # fmt: skip
    """Store s_b cross - q_b derivatives[1] - a_b derivatives[0] at the short branches' taps."""
    c = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BL + tl.arange(0, BL)
    inside = j < count
    tap = tl.load(which + j, inside, 0)
    at = numbers + tl.load(owners + j, inside, 0) * C + c
    inputs = tl.load(derivatives + c * row + j, inside, 0.0).to(tl.float32)
    energy = tl.load(derivatives + (C + c) * row + j, inside, 0.0).to(tl.float32)
    total = tl.load(at, inside, 0.0) * tl.load(cross + c * (taps + 1) + tap, inside, 0.0)
    total -= tl.load(at + nb * C, inside, 0.0) * energy + tl.load(at + 2 * nb * C, inside, 0.0) * inputs
    tl.store(out + c * taps + tap, total, inside)


@triton.jit(do_not_specialize=["ways"])
def _running_kernel(  # type: ignore[no-untyped-def]
    x, total, out, ways, LESS: tl.constexpr, FROM_END: tl.constexpr, N: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Add up matrices along their diagonals, from the start or the end on; LESS: store totals less that."""
    i = tl.arange(0, N)[:, None]
    e = tl.program_id(1) * BE - N + tl.arange(0, BE)[None, :]
    at = tl.program_id(0).to(tl.int64) * N * N + i * N + i + e
    inside = (i + e >= 0) & (i + e < N)
    sums = tl.cumsum(tl.load(x + at, inside, 0.0), 0, reverse=FROM_END)
    if LESS:
        sums = tl.load(total + tl.program_id(0) // ways * N + tl.abs(e), tl.abs(e) < N, 0.0) - sums
    tl.store(out + at, sums.to(out.dtype.element_ty), inside)


def _running(x: Tensor, from_end: bool, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return running sums along the diagonals of symmetric matrices (C, ways, N, N), or total (C, N) less those."""
    out, (C, ways, N, _) = torch.empty_like(x, dtype=dtype), x.shape
    width = min(N, DIAGONALS)
    _running_kernel[(C * ways, 2 * N // width)](
        x, x if total is None else total, out, ways, LESS=total is not None, FROM_END=from_end, N=N, BE=width,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class ShortPlan:
    """Which branches are short, on a device. They are padded to N taps, and to as many branches each way."""

    N: int
    first: int  # way: 0 back, 1 ahead
    branches: Tensor  # (ways, most): which are they; any, where there are fewer
    spread: Tensor  # (ways, most, N): which taps are they; one beyond the last, where there is none
    taps: Tensor  # (theirs,): which are they
    owners: Tensor  # (theirs,): their branches
    members: Tensor  # (theirs, nb): 1 where a tap is a branch's
    places: Tensor  # (2, theirs): where are they in (ways, 1 + most, N), of one row for a way and one for each branch


def short_plan(few: Sequence[int], sizes: Sequence[int], forwards: int, members: Tensor) -> ShortPlan:
    """Return the plan for the branches `few`, of all of these sizes, of which the first so many look back.

    members (taps, nb) are 1 where a tap is a branch's.
    """
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    both = [n for n in few if n < forwards], [n for n in few if n >= forwards]
    ways = [way for way in both if way]
    most, N = max(map(len, ways)), max(16, triton.next_power_of_2(max(sizes[n] for way in ways for n in way)))
    spread = torch.full((len(ways), most, N), sum(sizes))
    branches, taps = torch.zeros(len(ways), most, dtype=torch.int64), []
    for w, way in enumerate(ways):
        for k, n in enumerate(way):
            branches[w, k] = n
            spread[w, k, : sizes[n]] = starts[n] + torch.arange(sizes[n])
            row = w * (1 + most)
            taps += [(starts[n] + j, n, row * N + j, (row + 1 + k) * N + j) for j in range(sizes[n])]
    which, owners, *places = torch.tensor(taps).t()
    tables = (branches, spread, which, owners, members[which.to(members.device)], torch.stack(places))
    return ShortPlan(N, int(not both[0]), *(z.contiguous().to(members.device) for z in tables))


class ShortBranches:
    """The short ones among branches of kernels (C, taps) over rows x (C, B, time) of length L."""

    def __init__(self, x: Tensor, kernels: Tensor, plan: ShortPlan, L: int, lengths: Tensor | None) -> None:
        self.x, self.plan, self.L, self.masked = x, plan, L, lengths is not None
        self.lengths = x if lengths is None else lengths
        self.kernels = F.pad(kernels, (0, 1))[:, plan.spread].double()  # (C, ways, most, N)
        self.edges: tuple[Tensor, Tensor] | None = None

    def derivatives(self, correlation: Tensor) -> Tensor:
        """Return those of the sums of c_b and of c_b^2 / 2 by short branches' taps: what of u they meet, and R k.

        They are (2, C, taps of theirs); `correlation` (C, N) is u's with itself.
        """
        (C, B, time), ways, N = self.x.shape, len(self.plan.branches), self.plan.N
        grams, sums = (self.x.new_empty(C, ways, *n, N, dtype=torch.float32) for n in ((N,), ()))
        _gram_kernel[(C, ways)](
            self.x, self.lengths, grams, sums, B, self.L, time // 16, self.plan.first, MASKED=self.masked,
            WIDE=INTERPRETED, PRECISION="ieee" if INTERPRETED else "tf32", N=N, BB=SEQUENCES,
        )  # fmt: skip
        R = _running(grams, False, torch.float64, correlation)
        inputs = self.x.sum((1, 2), dtype=torch.float32)[:, None, None] - running_total(sums)
        both = torch.cat([inputs[:, :, None], (self.kernels @ R).float()], 2).flatten(1)
        return torch.stack([both[:, at] for at in self.plan.places])

    def gradient(self, numbers: Tensor, cross: Tensor, derivatives: Tensor, out: Tensor) -> None:
        """Write that of the short branches' taps into out (C, taps) for dc_b = s_b g - a_b - q_b c_b.

        numbers (3, nb, C) are s, q and a; cross (C, taps + 1) are u's correlations with g.
        """
        (C, taps), count = out.shape, len(self.plan.taps)
        _gradient_kernel[(C, triton.cdiv(count, TAPS))](
            numbers, cross, derivatives, self.plan.taps, self.plan.owners, out, C, numbers.shape[1], count, taps,
            derivatives.shape[2], BL=TAPS,
        )  # fmt: skip

    def pull(self, q: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return what terms -a_b - q_b c_b of dc_b, a and q (nb, C), give for du but for edges, which are kept.

        That is a kernel at lags 0 .. N - 1, the same at -1, ..., and a bias, (C, N) and (C,).
        """
        q, a = (z[self.plan.branches].permute(2, 0, 1)[..., None] for z in (q, a))
        S = _running((q * self.kernels).mT @ self.kernels, True, torch.float32)
        height = (a * self.kernels).sum(2).float()
        self.edges = S, running_total(height.flip(2)).flip(2)
        return -S[:, :, 0].sum(1), -height.sum((1, 2))

    def add_edges(self, du: Tensor) -> None:
        """Add to rows du what `pull` left to add next to edges."""
        assert self.edges is not None
        S, beyond = self.edges
        (C, B, time), ways = du.shape, len(self.plan.branches)
        for way in range(ways):  # one after the other: both edges may have the same values
            _add_edges_kernel[(C, triton.cdiv(B, SEQUENCES))](
                self.x, self.lengths, S, beyond, du, B, self.L, time // 16, ways, way, self.plan.first,
                MASKED=self.masked, PRECISION="ieee" if INTERPRETED else "tf32x3", N=self.plan.N, BB=SEQUENCES,
                num_warps=8,
            )  # fmt: skip
