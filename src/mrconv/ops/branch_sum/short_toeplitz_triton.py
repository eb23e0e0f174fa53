"""Short branches of the Toeplitz algorithm: statistics and gradients from matrices of the kernels' size.

The energy of a branch c = k * u is k' R k, where R[i, j] is the sum over batch and time of u[t - i] u[t - j]. R is
the input's autocorrelation at i - j minus the terms of outputs beyond an edge of the input: a cumulative sum along the
diagonals of y' y, where y are the input's values next to the edge. The gradient of the kernel is 2 R k. The gradient of
the input is its convolution with the kernels' autocorrelations minus, next to the edge, a cumulative sum along the
diagonals of k k'.

For causal branches the edge is the end of each sequence, y[n] = u[length - n] and y[0] = 0; for anticausal ones it is
the start, y[n] = u[n]. Terms that are added and subtracted again can be much larger than the result, so they are not
rounded to the input's dtype, nor multiplied in TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

import triton

from .._common import INTERPRETED
from .statistics import cumulative_sum

SEQUENCES, DIAGONALS, TAPS = 16, 32, 512  # per program


@triton.jit
def _edge(x, lengths, c, b, B, L, units, anticausal, MASKED: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets in x (C, B, time) of the N values next to an edge of sequences b, and which of them exist.

    `anticausal` is 0 for the end of the sequences, 1 for their start.
    """
    n = tl.arange(0, N)[None, :]
    length = tl.load(lengths + b, b < B, 0).to(tl.int32)[:, None] if MASKED else L
    t = tl.where(anticausal != 0, n, length - n)
    return (c * B + b)[:, None] * units * 16 + t, (b < B)[:, None] & (t >= 0) & (t < length)


@triton.jit(do_not_specialize=["B", "L", "units", "first"])
def _gram_kernel(  # type: ignore[no-untyped-def]
    x, lengths, grams, sums, B, L, units, first,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Store y' y and the sums of y over all sequences, for the edges y of one channel and direction."""
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
    index = c * tl.num_programs(1) + tl.program_id(1)
    tl.store(grams + index * N * N + n[:, None] * N + n[None, :], total)
    tl.store(sums + index * N + n, added)


@triton.jit(do_not_specialize=["B", "L", "units", "directions", "direction", "first"])
def _add_edges_kernel(  # type: ignore[no-untyped-def]
    x, lengths, matrices, shift, out, B, L, units, directions, direction, first,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Add the edges of x times a matrix, plus a shift, to the edges of `out`."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    n = tl.arange(0, N)
    at, inside = _edge(x, lengths, c, b, B, L, units, first + direction, MASKED, N)
    y = tl.load(x + at, inside, 0.0).to(tl.float32)
    matrix = tl.load(matrices + (c * directions + direction) * N * N + n[:, None] * N + n[None, :])
    total = (
        tl.dot(y, matrix, input_precision=PRECISION) + tl.load(shift + (c * directions + direction) * N + n)[None, :]
    )
    tl.store(out + at, total + tl.load(out + at, inside, 0.0), inside)


@triton.jit(do_not_specialize=["C", "N", "count", "taps", "stride"])
def _gradient_kernel(  # type: ignore[no-untyped-def]
    normalization, cross, derivatives, which, owners, out, C, N, count, taps, stride, BL: tl.constexpr,
):  # fmt: skip
    """Store s_b cross - q_b derivatives[1] - a_b derivatives[0] at the short branches' taps."""
    c = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BL + tl.arange(0, BL)
    inside = j < count
    tap = tl.load(which + j, inside, 0)
    at = normalization + tl.load(owners + j, inside, 0) * C + c
    inputs = tl.load(derivatives + c * stride + j, inside, 0.0).to(tl.float32)
    energy = tl.load(derivatives + (C + c) * stride + j, inside, 0.0).to(tl.float32)
    total = tl.load(at, inside, 0.0) * tl.load(cross + c * (taps + 1) + tap, inside, 0.0)
    total -= tl.load(at + N * C, inside, 0.0) * energy + tl.load(at + 2 * N * C, inside, 0.0) * inputs
    tl.store(out + c * taps + tap, total, inside)


@triton.jit(do_not_specialize=["directions"])
def _cumulative_kernel(  # type: ignore[no-untyped-def]
    x, total, out, directions, SUBTRACT: tl.constexpr, FROM_END: tl.constexpr, N: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store cumulative sums of matrices along their diagonals, from the end if FROM_END; if SUBTRACT, total - sums."""
    i = tl.arange(0, N)[:, None]
    e = tl.program_id(1) * BE - N + tl.arange(0, BE)[None, :]
    at = tl.program_id(0).to(tl.int64) * N * N + i * N + i + e
    inside = (i + e >= 0) & (i + e < N)
    sums = tl.cumsum(tl.load(x + at, inside, 0.0), 0, reverse=FROM_END)
    if SUBTRACT:
        sums = tl.load(total + tl.program_id(0) // directions * N + tl.abs(e), tl.abs(e) < N, 0.0) - sums
    tl.store(out + at, sums.to(out.dtype.element_ty), inside)


def _diagonal_sums(x: Tensor, from_end: bool, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return cumulative sums along the diagonals of symmetric (C, directions, N, N), or total (C, N) minus these."""
    out, (C, directions, N, _) = torch.empty_like(x, dtype=dtype), x.shape
    width = min(N, DIAGONALS)
    _cumulative_kernel[(C * directions, 2 * N // width)](
        x, x if total is None else total, out, directions, SUBTRACT=total is not None, FROM_END=from_end, N=N, BE=width,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class ShortPlan:
    """Indices of the short branches, on a device, padded to N taps and to the same number in each direction."""

    N: int
    first: int  # direction: 0 causal, 1 anticausal
    branches: Tensor  # (directions, branches): branch indices, arbitrarily padded
    spread: Tensor  # (directions, branches, N): tap indices, padded with the number of taps
    taps: Tensor  # (short taps,): tap indices
    owners: Tensor  # (short taps,): the branch of each tap
    members: Tensor  # (short taps, all branches): 1 where a tap belongs to a branch
    positions: Tensor  # (2, short taps): of each tap in (directions, 1 + branches, N), at index 0 and at its branch


def short_plan(few: Sequence[int], sizes: Sequence[int], causal: int, members: Tensor) -> ShortPlan:
    """Return the plan for the branches `few` among branches of these sizes, the first `causal` of them causal.

    members (taps, branches) are 1 where a tap belongs to a branch.
    """
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    both = [n for n in few if n < causal], [n for n in few if n >= causal]
    directions = [direction for direction in both if direction]
    longest = max(sizes[n] for direction in directions for n in direction)
    most, N = max(map(len, directions)), max(16, triton.next_power_of_2(longest))
    spread = torch.full((len(directions), most, N), sum(sizes))
    branches, taps = torch.zeros(len(directions), most, dtype=torch.int64), []
    for d, direction in enumerate(directions):
        for k, n in enumerate(direction):
            branches[d, k] = n
            spread[d, k, : sizes[n]] = starts[n] + torch.arange(sizes[n])
            first = d * (1 + most)
            taps += [(starts[n] + j, n, first * N + j, (first + 1 + k) * N + j) for j in range(sizes[n])]
    which, owners, *positions = torch.tensor(taps).t()
    tables = (branches, spread, which, owners, members[which.to(members.device)], torch.stack(positions))
    return ShortPlan(N, int(not both[0]), *(z.contiguous().to(members.device) for z in tables))


class ShortBranches:
    """The short branches of kernels (C, taps) over x (C, B, time) of length L."""

    def __init__(self, x: Tensor, kernels: Tensor, plan: ShortPlan, L: int, lengths: Tensor | None) -> None:
        self.x, self.plan, self.L, self.masked = x, plan, L, lengths is not None
        self.lengths = x if lengths is None else lengths
        self.kernels = F.pad(kernels, (0, 1))[:, plan.spread].double()  # (C, directions, most, N)
        self.edges: tuple[Tensor, Tensor] | None = None

    def derivatives(self, correlation: Tensor) -> Tensor:
        """Return the derivatives (2, C, short taps) of the sums of c_b and of c_b^2 / 2 with respect to the taps.

        They are the sums of the inputs at each tap, and R k; `correlation` (C, N) is u's autocorrelation.
        """
        (C, B, time), directions, N = self.x.shape, len(self.plan.branches), self.plan.N
        grams, sums = (self.x.new_empty(C, directions, *n, N, dtype=torch.float32) for n in ((N,), ()))
        _gram_kernel[(C, directions)](
            self.x, self.lengths, grams, sums, B, self.L, time // 16, self.plan.first, MASKED=self.masked,
            WIDE=INTERPRETED, PRECISION="ieee" if INTERPRETED else "tf32", N=N, BB=SEQUENCES,
        )  # fmt: skip
        R = _diagonal_sums(grams, False, torch.float64, correlation)
        inputs = self.x.sum((1, 2), dtype=torch.float32)[:, None, None] - cumulative_sum(sums)
        both = torch.cat([inputs[:, :, None], (self.kernels @ R).float()], 2).flatten(1)
        return torch.stack([both[:, at] for at in self.plan.positions])

    def write_gradient(self, normalization: Tensor, cross: Tensor, derivatives: Tensor, out: Tensor) -> None:
        """Write the gradient of the short branches' taps to out (C, taps) for dc_b = s_b g - a_b - q_b c_b.

        normalization (3, N, C) are s, q and a; cross (C, taps + 1) are u's correlations with g.
        """
        (C, taps), count = out.shape, len(self.plan.taps)
        _gradient_kernel[(C, triton.cdiv(count, TAPS))](
            normalization, cross, derivatives, self.plan.taps, self.plan.owners, out, C, normalization.shape[1],
            count, taps, derivatives.shape[2], BL=TAPS,
        )  # fmt: skip

    def input_gradient(self, q: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contribution of -a_b - q_b c_b to du, as an even kernel (C, N) to apply to u and a bias (C,).

        q and a are (branches, C). The terms next to the edges are kept for `add_edges`.
        """
        q, a = (z[self.plan.branches].permute(2, 0, 1)[..., None] for z in (q, a))
        S = _diagonal_sums((q * self.kernels).mT @ self.kernels, True, torch.float32)
        height = (a * self.kernels).sum(2).float()
        self.edges = S, cumulative_sum(height.flip(2)).flip(2)
        return -S[:, :, 0].sum(1), -height.sum((1, 2))

    def add_edges(self, du: Tensor) -> None:
        """Add the terms of `input_gradient` next to the edges to du (C, B, time)."""
        assert self.edges is not None
        S, beyond = self.edges
        (C, B, time), directions = du.shape, len(self.plan.branches)
        for direction in range(directions):  # one after the other: the edges may overlap
            _add_edges_kernel[(C, triton.cdiv(B, SEQUENCES))](
                self.x, self.lengths, S, beyond, du, B, self.L, time // 16, directions, direction, self.plan.first,
                MASKED=self.masked, PRECISION="ieee" if INTERPRETED else "tf32x3", N=self.plan.N, BB=SEQUENCES,
                num_warps=8,
            )  # fmt: skip
