"""Short branches of `toeplitz_branch_sum`: their statistics and gradients come from matrices of a kernel's size.

The energy of a branch c = k * u is k' R k, R[i, j] being the sum over batch and time of u[t - i] u[t - j]. That is the
input's autocorrelation at i - j, but for outputs beyond an edge of the input, which do not count: a running sum along
the diagonals of y' y, where y are the input's values next to the edge. Gradients are 2 R k and, for the input, its
convolution with the kernels' autocorrelations less, next to the edge, a running sum of the same kind over k' k.

Branches that look back meet the end of the input, y[n] = u[length - n]; those that look ahead its start, y[n] = u[n].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

import triton

from .backends import INTERPRETED
from .statistics import running_total

SEQUENCES, DIAGONALS, TAPS = 16, 32, 512  # of a program


@triton.jit
def _edge(x, lengths, c, b, B, L, units, ahead, MASKED: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where in rows x (C, B, time) sequences b have their N values next to an edge, and if they are there."""
    n = tl.arange(0, N)[None, :]
    length = tl.load(lengths + b, b < B, 0).to(tl.int32)[:, None] if MASKED else L
    place = tl.where(ahead != 0, n, length - n)
    return (c * B + b)[:, None] * units * 16 + place, (b < B)[:, None] & (place >= 0) & (place < length)


@triton.jit(do_not_specialize=["B", "L", "units", "first"])
def _gram_kernel(  # type: ignore[no-untyped-def]
    x, lengths, grams, sums, B, L, units, first,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Store y' y and the sums of y over all sequences, for the edges y of one channel."""
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
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Add to edges of rows `out` those of x times a matrix, and a shift."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    n = tl.arange(0, N)
    at, inside = _edge(x, lengths, c, b, B, L, units, first + way, MASKED, N)
    y = tl.load(x + at, inside, 0.0)
    matrix = tl.load(matrices + (c * ways + way) * N * N + n[:, None] * N + n[None, :])
    if WIDE:
        y, matrix = y.to(tl.float32), matrix.to(tl.float32)
    total = tl.dot(y, matrix, input_precision=PRECISION) + tl.load(shift + (c * ways + way) * N + n)[None, :]
    total += tl.load(out + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["C", "nb", "count", "taps"])
def _gradient_kernel(  # type: ignore[no-untyped-def]
    numbers, cross, derivatives, which, owners, out, C, nb, count, taps, BL: tl.constexpr,
):  # fmt: skip
    """Store s_b cross - q_b derivatives[1] - a_b derivatives[0] at the short branches' taps."""
    c = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BL + tl.arange(0, BL)
    inside = j < count
    tap = tl.load(which + j, inside, 0)
    at = numbers + tl.load(owners + j, inside, 0) * C + c
    met = tl.load(derivatives + c * taps + tap, inside, 0.0).to(tl.float32)
    energy = tl.load(derivatives + (C + c) * taps + tap, inside, 0.0).to(tl.float32)
    total = tl.load(at, inside, 0.0) * tl.load(cross + c * (taps + 1) + tap, inside, 0.0)
    total -= tl.load(at + nb * C, inside, 0.0) * energy + tl.load(at + 2 * nb * C, inside, 0.0) * met
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
class Short:
    """Which branches are short, on a device. They are padded to N taps, and to as many branches each way."""

    N: int
    first: int  # way: 0 back, 1 ahead
    branches: Tensor  # (ways, most): which are they; any, where there are fewer
    spread: Tensor  # (ways, most, N): which taps are they; one beyond the last, where there is none
    taps: Tensor  # (theirs,): which are they
    owners: Tensor  # (theirs,): their branches
    places: Tensor  # (2, theirs): where are they in (ways, 1 + most, N), of one row for a way and one for each branch


def short_of(sizes: Sequence[int], forwards: int, limit: int, device: torch.device) -> Short | None:
    """Tell which branches of these sizes, of which the first so many look back, have few taps; None: not one."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    both = [[n for n in way if sizes[n] <= limit] for way in (range(forwards), range(forwards, len(sizes)))]
    ways = [way for way in both if way]
    if not ways:
        return None
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
    numbers = (branches, spread, which, owners, torch.stack(places))
    return Short(N, int(not both[0]), *(z.contiguous().to(device) for z in numbers))


class ShortBranches:
    """The short ones among branches of kernels (C, taps) over rows x (C, B, time) of length L."""

    def __init__(self, x: Tensor, kernels: Tensor, short: Short, L: int, lengths: Tensor | None) -> None:
        self.x, self.short, self.L, self.lengths = x, short, L, lengths
        self.kernels = F.pad(kernels, (0, 1))[:, short.spread].float()  # (C, ways, most, N)
        self.options = {
            "MASKED": lengths is not None, "WIDE": INTERPRETED, "PRECISION": "ieee" if INTERPRETED else "tf32",
            "N": short.N, "BB": SEQUENCES,
        }  # fmt: skip

    def derivatives(self, correlation: Tensor) -> Tensor:
        """Return those of the sums of c_b and of c_b^2 / 2 by short branches' taps: what they meet, and R k.

        They are (2, C, taps of theirs); `correlation` (C, N) is u's with itself.
        """
        (C, B, time), ways, N = self.x.shape, len(self.short.branches), self.short.N
        grams, sums = (self.x.new_empty(C, ways, *n, N, dtype=torch.float32) for n in ((N,), ()))
        lengths = self.x if self.lengths is None else self.lengths
        _gram_kernel[(C, ways)](self.x, lengths, grams, sums, B, self.L, time // 16, self.short.first, **self.options)
        R = _running(grams, False, torch.float32, correlation)
        met = self.x.sum((1, 2), dtype=torch.float32)[:, None, None] - running_total(sums)
        both = torch.cat([met[:, :, None], self.kernels @ R], 2).flatten(1)
        return torch.stack([both[:, at] for at in self.short.places])

    def gradient(self, numbers: Tensor, cross: Tensor, derivatives: Tensor, out: Tensor) -> None:
        """Write that of the short branches' taps into out (C, taps) for dc_b = s_b g - a_b - q_b c_b.

        numbers (3, nb, C) are s, q and a; cross (C, taps + 1) are u's correlations with g.
        """
        (C, taps), count = out.shape, len(self.short.taps)
        _gradient_kernel[(C, triton.cdiv(count, TAPS))](
            numbers, cross, derivatives, self.short.taps, self.short.owners, out, C, numbers.shape[1], count, taps,
            BL=TAPS,
        )  # fmt: skip

    def pull(self, q: Tensor, a: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return what terms -a_b - q_b c_b of dc_b, a and q (nb, C), give for du.

        That is a kernel (C, 2 N - 1) at lags 1 - N .. N - 1, a bias (C,), and what `add_edges` takes.
        """
        q, a = (z[self.short.branches].permute(2, 0, 1)[..., None] for z in (q, a))
        S = _running((q * self.kernels).mT @ self.kernels, True, self.x.dtype)
        height = (a * self.kernels).sum(2)
        beyond = running_total(height.flip(2)).flip(2)
        r = S[:, :, 0].float().sum(1)
        return -torch.cat([r[:, 1:].flip(1), r], 1), -height.sum((1, 2)), (S, beyond)

    def add_edges(self, S: Tensor, beyond: Tensor, du: Tensor) -> None:
        """Add to rows du what they have next to edges."""
        (C, B, time), ways = du.shape, S.shape[1]
        lengths = self.x if self.lengths is None else self.lengths
        for way in range(ways):  # one after the other: both edges may have the same values
            _add_edges_kernel[(C, triton.cdiv(B, self.options["BB"]))](
                self.x, lengths, S, beyond, du, B, self.L, time // 16, ways, way, self.short.first, **self.options
            )
