"""The Triton kernels behind `toeplitz_branch_sum`: normalised branches on the tensor cores, none of them in memory.

Rows, strips and products are those of `toeplitz_triton.py`, with a strip for each long branch; short branches are in
`short_branches_triton.py`. A long branch's outputs stay in registers, where they become its statistics or, going back,
its gradient dc_b: that is stored, for some channels at a time, as two products need it. One is dc_b with the kernel
turned around, summed over branches, which is du. The other gives the kernel's gradient: for two blocks of time p and
p + d, the sum over p and all sequences of u[p, i] dc_b[p + d, j] is a matrix whose diagonal j - i = e belongs to lag
d SQUARE + e.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

import triton

from ..backends import INTERPRETED
from ..toeplitz_conv import triton_kernels as rows
from ..toeplitz_conv.op import SHORT
from ..toeplitz_conv.triton_kernels import Tile, add_products, grid_of, margins, reached, rows_of
from ..triton_tools import summed
from .short_toeplitz_triton import ShortBranches, ShortPlan, short_plan

TILE = Tile(128, 128, 32, 4, 4)  # of all passes over the branches: the best of those tried on an H200
CORRELATE = {"STAGES": 3, "num_warps": 4}
SQUARE = 64  # of time, to either side of the products that are summed along diagonals
SLICE_BYTES = 512 * 2**20  # of the branches' gradients that are in memory at a time, about
STRIP_BLOCK = 512  # lags at a time where strips are written
TAP_BLOCK = 1024  # taps of a program that adds up their parts


@triton.jit
def _group(groups, n):  # type: ignore[no-untyped-def]
    """Return of strip n its first lag, its width, where it begins, and the chunks that it reaches from and to."""
    at = groups + 7 * n
    return (
        tl.load(at + 2) * 16, tl.load(at + 3) * 16, tl.load(at + 4).to(tl.int64) * 16, tl.load(at + 5), tl.load(at + 6),
    )  # fmt: skip


@triton.jit(do_not_specialize=["C", "taps"])
def _strips_kernel(  # type: ignore[no-untyped-def]
    kernels, factors, skip, strips, branches, groups, C, taps,
    FACTORS: tl.constexpr, SKIP: tl.constexpr, REVERSE: tl.constexpr, COPIES: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Write one copy of one channel's strip of a group of branches: their sum, each times its factor, and the skip."""
    c = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    group = groups + 7 * tl.program_id(2)
    first = tl.load(group)
    last = first + tl.load(group + 1)
    low, width, begin, _, _ = _group(groups, tl.program_id(2))
    out = strips + (begin * C + c * width) * COPIES + r * width
    for start in range(0, width, BL):
        i = start + tl.arange(0, BL)
        lag = low + i - r
        if REVERSE:
            lag = -lag
        total = tl.zeros([BL], tl.float32)
        if SKIP:
            total = tl.where(lag == 0, tl.load(skip + c).to(tl.float32), total)
        for n in range(first, last):
            j = tl.where(tl.load(branches + 3 * n + 2) != 0, -1 - lag, lag)
            inside = (j >= 0) & (j < tl.load(branches + 3 * n + 1))
            v = tl.load(kernels + c * taps + tl.load(branches + 3 * n) + j, inside, 0.0).to(tl.float32)
            if FACTORS:
                v *= tl.load(factors + n * C + c)
            total += v
        tl.store(out + i, total.to(strips.dtype.element_ty), i < width)


@triton.jit(do_not_specialize=["C", "c0", "B", "L", "time", "rows_a_block", "blocks", "tiles", "chunks"])
def _branches_kernel(  # type: ignore[no-untyped-def]
    x, g, strips, groups, lengths, numbers, out, C, c0, B, L, time, rows_a_block, blocks, tiles, chunks,
    MASKED: tl.constexpr, PULL: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One branch in a tile: store the sums of its outputs and of their squares or, to pull, its dc = s g - a - q c."""
    N = tl.num_programs(1)
    n = N - 1 - tl.program_id(1)
    here = tl.program_id(0) // tiles
    c = (c0 + here).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    block, b, real, earliest, latest = rows_of(tile, rows_a_block, B, blocks, ROWS)
    low, width, start, begin, end = _group(groups, n)
    row = (c * B + b)[:, None] * time * 16
    total = add_products(
        tl.zeros([ROWS, BLOCK], tl.float32), x + row, strips + (start * C + c * width) * COPIES, width, -low,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = real[:, None] & (at < L)
    if MASKED:
        valid = real[:, None] & (at < tl.load(lengths + b, real, 0).to(tl.int32)[:, None])
    if PULL:
        s = tl.load(numbers + n * C + c)
        q = tl.load(numbers + (N + n) * C + c)
        a = tl.load(numbers + (2 * N + n) * C + c)
        pull = tl.load(g + row + at, real[:, None], 0.0).to(tl.float32)
        total = tl.where(valid, s * pull - a - q * total, 0.0)
        own = ((tl.num_programs(0) // tiles).to(tl.int64) * n + here) * B + b
        tl.store(out + own[:, None] * time * 16 + at, total.to(out.dtype.element_ty), real[:, None])
    else:
        total = tl.where(valid, total, 0.0)
        out += (tile.to(tl.int64) * 2 * N + n) * C + c
        tl.store(out, tl.sum(tl.sum(total, 1), 0))
        tl.store(out + N * C, tl.sum(tl.sum(total * total, 1), 0))


@triton.jit(do_not_specialize=["N", "C", "c0", "B", "time", "rows_a_block", "blocks", "tiles", "chunks"])
def _back_kernel(  # type: ignore[no-untyped-def]
    dc, g, x, strips, groups, near, near_group, energy, energy_groups, bias, out,
    N, C, c0, B, time, rows_a_block, blocks, tiles, chunks,
    SHORT: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store du: the long branches' gradients with their kernels turned around, and what short branches ask for.

    That is g with the strip `near`, x with the strips `energy`, of a rounded kernel and what rounding left, and a bias.
    """
    here = tl.program_id(0) // tiles
    c = (c0 + here).to(tl.int64)
    tile = tl.program_id(0) % tiles
    block, b, real, earliest, latest = rows_of(tile, rows_a_block, B, blocks, ROWS)
    row = (c * B + b)[:, None] * time * 16
    low, width, start, begin, end = _group(near_group, 0)
    total = add_products(
        tl.zeros([ROWS, BLOCK], tl.float32), g + row, near + c * width * COPIES, width, -low,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    if SHORT:
        total += tl.load(bias + c)
        for n in range(2):
            low, width, start, begin, end = _group(energy_groups, n)
            total = add_products(
                total, x + row, energy + (start * C + c * width) * COPIES, width, -low,
                begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
            )  # fmt: skip
    for n in range(N):
        low, width, start, begin, end = _group(groups, n)
        own = ((tl.num_programs(0) // tiles).to(tl.int64) * n + here) * B + b
        total = add_products(
            total, dc + own[:, None] * time * 16, strips + (start * C + c * width) * COPIES, width, -low,
            begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
        )  # fmt: skip
    at = row + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, total, real[:, None])


@triton.jit(do_not_specialize=["C", "c0", "B", "time", "blocks", "pairs"])
def _correlate_kernel(  # type: ignore[no-untyped-def]
    x, dc, which, out, C, c0, B, time, blocks, pairs,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For a channel, a branch and a distance of blocks, store the sums along the diagonals of the blocks' products."""
    here = (tl.program_id(0) // pairs).to(tl.int64)
    n = tl.load(which + 2 * (tl.program_id(0) % pairs)).to(tl.int64)
    d = tl.load(which + 2 * (tl.program_id(0) % pairs) + 1)
    i = tl.arange(0, BLOCK)
    b = tl.arange(0, BATCH)
    first = tl.maximum(0, -d)
    mine = x + (c0 + here) * B * time * 16
    there = dc + (n * C + here) * B * time * 16 + d * BLOCK
    sequences = tl.cdiv(B, BATCH)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in tl.range(0, (blocks - tl.abs(d)) * sequences, num_stages=STAGES):
        row = k % sequences * BATCH + b
        at = row[:, None].to(tl.int64) * time * 16 + (first + k // sequences) * BLOCK + i[None, :]
        v = tl.load(mine + at, (row < B)[:, None], 0.0)
        w = tl.load(there + at, (row < B)[:, None], 0.0)
        if WIDE:
            v, w = v.to(tl.float32), w.to(tl.float32)
        total = tl.dot(tl.trans(v), w, total, input_precision=PRECISION)
    column = i[:, None] + i[None, :]
    turned = tl.gather(total, column % BLOCK, 1)  # column e holds the diagonals e and e - BLOCK
    out += tl.program_id(0).to(tl.int64) * 2 * BLOCK + i
    tl.store(out, tl.sum(tl.where(column < BLOCK, 0.0, turned), 0))
    tl.store(out + BLOCK, tl.sum(tl.where(column < BLOCK, turned, 0.0), 0))


@triton.jit(do_not_specialize=["taps", "width", "row"])
def _taps_kernel(diagonals, parts, out, taps, width, row, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the two parts of each tap, and store them where they belong in a row."""
    c = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BL + tl.arange(0, BL)
    near = tl.load(diagonals + c * width + tl.load(parts + j, j < taps, 0), j < taps, 0.0)
    far = tl.load(diagonals + c * width + tl.load(parts + taps + j, j < taps, 0), j < taps, 0.0)
    tl.store(out + c * row + tl.load(parts + 2 * taps + j, j < taps, 0), near + far, j < taps)


@dataclass(frozen=True)
class Strips:
    """Sums of branches written out: their numbers on the device, and how wide all strips are together."""

    branches: Tensor  # (branches, 3): first of its taps, how many, whether it looks ahead
    groups: Tensor  # (groups, 7): first branch, how many; first lag, width, where it begins; first and last chunk
    width: int
    reverse: bool


@dataclass(frozen=True)
class Correlations:
    """Pairs (branch, distance of blocks), and where in their diagonals each tap's two parts are."""

    pairs: Tensor  # (pairs, 2)
    parts: Tensor  # (3, taps): two parts, and the place that they go to


@dataclass(frozen=True)
class Plan:
    """What the kernels know of the branches beforehand, on a device."""

    members: Tensor  # (taps, nb): 1 where a tap is a branch's
    short: ShortPlan | None
    long: Tensor  # which branches are
    each: Strips  # of the long ones
    back: Strips
    merged: Strips
    near: Strips  # of the short ones merged, turned around
    energy: Strips  # of a kernel that looks N - 1 ahead and back, rounded, and of what rounding left
    lags: tuple[int, int]  # of the merged kernel, lowest and highest
    own: Correlations  # of u with each long branch's gradient
    cross: Correlations  # of u with the output's gradient, at the lags of all taps and at 0
    auto: Correlations  # of u with itself, as far as short branches reach


def _lags(size: int, ahead: bool) -> range:
    return range(-1, -1 - size, -1) if ahead else range(size)


def _strips(branches: Tensor, kernels: Sequence[tuple[int, int, int, int]], reverse: bool = False) -> Strips:
    """Return strips for (first branch, how many, lowest lag, highest lag)."""
    numbers, width = [], 0
    for first, count, low, high in kernels:
        low, high = (-high, -low) if reverse else (low, high)
        start, units = margins(low, high, TILE)
        numbers.append((first, count, start, units, width, *reached(low, high, TILE)))
        width += units
    return Strips(branches, torch.tensor(numbers, dtype=torch.int32, device=branches.device), width * 16, reverse)


def _correlations(
    kernels: Sequence[tuple[int, range]], blocks: int, device: torch.device, places: Sequence[int] | None = None
) -> Correlations:
    """Return what gives all taps of kernels (branch, lags), in a row or where their places are.

    Lags that cannot meet the input get zeros.
    """
    squares: dict[tuple[int, int], int] = {}
    block, within = SQUARE, blocks * TILE.block // SQUARE
    parts: list[tuple[int, int, int]] = []
    for n, lags in kernels:
        for lag in lags:
            near, e = divmod(lag, block)
            found = []
            for d, diagonal in ((near, e), (near + 1, e - block)):
                if diagonal > -block and abs(d) < within:
                    found.append(2 * block * squares.setdefault((n, d), len(squares)) + block + diagonal)
            own = len(parts) if places is None else places[len(parts)]
            one, other = (*found, 0, 0)[:2]  # of the first square the first diagonal, which is none
            parts.append((one, other, own))
    return Correlations(
        torch.tensor(list(squares), dtype=torch.int32, device=device),
        torch.tensor(parts, dtype=torch.int32, device=device).reshape(-1, 3).t().contiguous(),
    )


def plan_for(sizes: Sequence[int], forwards: int, L: int, device: torch.device) -> Plan:
    """Return the plan for branches of these sizes, of which the first so many look back, and inputs of length L.

    Many L have the same. Branches count as short for inputs only that are eight times as long or more: what would be
    beyond an edge is added first and taken away again.
    """
    blocks = min(triton.cdiv(L, TILE.block), triton.cdiv(max(sizes), TILE.block) + 1)
    return _plan(tuple(sizes), forwards, blocks, min(SHORT, L // 128 * 16), device)


@functools.lru_cache(maxsize=1024)
def _plan(sizes: tuple[int, ...], forwards: int, blocks: int, limit: int, device: torch.device) -> Plan:
    with torch.inference_mode(False):
        nb, starts = len(sizes), [0, *itertools.accumulate(sizes)]
        lags = [_lags(size, n >= forwards) for n, size in enumerate(sizes)]
        reachable = [own[: blocks * TILE.block] for own in lags]
        few, many = ([n for n in range(nb) if (0 < sizes[n] <= limit) == wanted] for wanted in (True, False))
        members = torch.repeat_interleave(torch.eye(nb, dtype=torch.float64), torch.tensor(sizes), 0).to(device)
        short = short_plan(few, sizes, forwards, members) if few else None
        N = short.N if short else 1

        def ends(which: Sequence[int]) -> tuple[int, int]:
            every = [0, *(lag for n in which for lag in (*reachable[n][:1], *reachable[n][-1:]))]
            return min(every), max(every)

        def table(rows: Sequence[tuple[int, int, bool]]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int32, device=device)

        branches = table([(starts[n], sizes[n], n >= forwards) for n in range(nb)])
        each = [(n, 1, min(reachable[n], default=0), max(reachable[n], default=0)) for n in many]
        there_and_back = table(
            [(n, size, n % N > 0) for start in (0, N) for n, size in ((start, N), (start + 1, N - 1))]
        )
        theirs = [j for n in many for j in range(starts[n], starts[n + 1])]
        return Plan(
            members=members,
            short=short,
            long=torch.tensor(many, dtype=torch.int64, device=device),
            each=_strips(branches, each),
            back=_strips(branches, each, True),
            merged=_strips(branches, [(0, nb, *ends(range(nb)))]),
            near=_strips(branches, [(0, nb, *ends(few))], True),
            energy=_strips(there_and_back, [(first, 2, 1 - N, N - 1) for first in (0, 2)]),
            lags=ends(range(nb)),
            own=_correlations([(k, lags[n]) for k, n in enumerate(many)], blocks, device, theirs),
            cross=_correlations([(0, own) for own in (*lags, range(1))], blocks, device),
            auto=_correlations([(0, range(N))], blocks, device),
        )


class ToeplitzBranches:
    """Branches of dense kernels (C, taps), side by side, over an input u (B, C, L)."""

    def __init__(self, u: Tensor, kernels: Tensor, sizes: Sequence[int], forwards: int, lengths: Tensor | None) -> None:
        self.B, self.C, self.L = u.shape
        self.plan = plan_for(sizes, forwards, self.L, u.device)
        self.kernels, self.x, self.lengths = kernels.to(u.dtype).contiguous(), self.rows(u), lengths
        self.time, self.grid = self.x.shape[2], grid_of(self.B, self.L, TILE)
        short = self.plan.short
        self.short = short and ShortBranches(self.x, self.kernels, short, self.L, lengths)

    def rows(self, u: Tensor) -> Tensor:
        """Return u (B, C, L) contiguous as (C, B, time), padded with zeros to whole blocks."""
        x = rows.scratch(u, TILE.block)
        rows.copy_rows(u, x, True)
        return x.transpose(0, 1)

    def _strip(
        self, of: Strips, factors: Tensor | None = None, skip: Tensor | None = None, kernels: Tensor | None = None
    ) -> Tensor:
        """Return strips (groups, C, copies, width), of widths of their own, one after the other."""
        kernels = self.kernels if kernels is None else kernels
        out = self.x.new_empty(self.C * rows.COPIES * of.width)
        _strips_kernel[(self.C, rows.COPIES, len(of.groups))](
            kernels, kernels if factors is None else factors, kernels if skip is None else skip, out, of.branches,
            of.groups, self.C, kernels.shape[1], FACTORS=factors is not None, SKIP=skip is not None, REVERSE=of.reverse,
            COPIES=rows.COPIES, BL=STRIP_BLOCK,
        )  # fmt: skip
        return out

    def _branches(self, strips: Tensor, numbers: Tensor, out: Tensor, g: Tensor | None, c0: int, C: int) -> None:
        """Go through the long branches of C channels from c0 on: for statistics or, with g, to find their dc."""
        _branches_kernel[(self.grid.tiles * C, len(self.plan.long))](
            self.x, self.x if g is None else g, strips, self.plan.each.groups,
            self.x if self.lengths is None else self.lengths, numbers, out, self.C, c0, self.B, self.L, self.time // 16,
            *self.grid, MASKED=self.lengths is not None, PULL=g is not None, **rows.products(self.x.dtype, TILE),
        )  # fmt: skip

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the sums of c_b and of c_b^2 over batch and valid positions, (2, nb, C).

        Those of c_b and of c_b^2 / 2 have the derivatives by taps that are returned too, (2, C, taps), if c_b is short.
        """
        sums = self.x.new_empty(2, self.plan.members.shape[1], self.C, dtype=torch.float64)
        derivatives = self.x.new_empty(2, self.C, 0, dtype=torch.float32)
        if self.short:
            correlation = self._correlate(self.x[None], self.plan.auto, self._taps(self.short.plan.N))
            derivatives = self.short.derivatives(correlation)
            each = (self.kernels[:, self.short.plan.taps] * derivatives).double() @ self.short.plan.members
            sums = each.transpose(1, 2).contiguous()
        if len(self.plan.long):
            parts = self.x.new_empty(self.grid.tiles, 2, len(self.plan.long), self.C, dtype=torch.float32)
            self._branches(self._strip(self.plan.each), parts, parts, None, 0, self.C)
            sums[:, self.plan.long] = summed(parts).to(sums.dtype)
        return sums, derivatives

    def output(self, like: Tensor, scale: Tensor, skip: Tensor | None, bias: Tensor) -> Tensor:
        """y = sum_b scale_b c_b + skip u + bias."""
        y, p = torch.empty_like(like), self.plan
        out = rows.scratch(like, TILE.block)
        strip = self._strip(p.merged, scale.contiguous(), skip).view(self.C, rows.COPIES, -1)
        x = self.x.transpose(0, 1)
        rows.conv_rows(x, strip, None, bias, out, self.L, *p.lags, False, TILE)
        rows.copy_rows(y, out, False)
        return y

    def _correlate(self, dc: Tensor, of: Correlations, out: Tensor, c0: int = 0) -> Tensor:
        """Write the taps' sums of u with dc (branches, channels from c0 on, B, time) into out (channels, taps)."""
        C, pairs, taps = dc.shape[1], len(of.pairs), of.parts.shape[1]
        found = dc.new_empty(C, pairs * 2 * SQUARE, dtype=torch.float32)
        batch = min(64, max(16, triton.next_power_of_2(self.B)))
        _correlate_kernel[(C * pairs,)](
            self.x, dc, of.pairs, found, C, c0, self.B, self.time // 16, self.time // SQUARE, pairs,
            WIDE=INTERPRETED, PRECISION="ieee" if INTERPRETED else "tf32", BLOCK=SQUARE, BATCH=batch, **CORRELATE,
        )  # fmt: skip
        _taps_kernel[(C, triton.cdiv(taps, TAP_BLOCK))](
            found, of.parts, out, taps, found.shape[1], out.stride(0), BL=TAP_BLOCK
        )
        return out

    def _taps(self, count: int) -> Tensor:
        return self.x.new_empty(self.C, count, dtype=torch.float32)

    def products(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over batch and time of g c_b, (nb, C), of g, (C,), and of g u at all taps and at lag 0."""
        cross = self._correlate(g[None], self.plan.cross, self._taps(1 + self.kernels.shape[1]))
        inner = (self.kernels * cross[:, :-1]).double() @ self.plan.members
        return inner.t().float(), g.sum((1, 2), dtype=torch.float32), cross

    def pull(
        self, g: Tensor, numbers: Tensor, cross: Tensor, derivatives: Tensor, skip: Tensor | None, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return du, like a tensor, and the kernels' gradient for dc_b = s_b g - a_b - q_b c_b and rows g.

        numbers (3, nb, C) are s, q and a; `products` and `moments` have returned cross and derivatives. A few channels
        at a time, since every long branch's dc is in memory meanwhile.
        """
        p, N, short = self.plan, len(self.plan.long), self.short
        du = torch.empty_like(self.x, dtype=torch.float32)
        dkernels = self._taps(self.kernels.shape[1])
        near = self._strip(p.near, numbers[0].index_fill(0, p.long, 0), skip)
        energy, bias = near, near
        if short:
            short.gradient(numbers, cross, derivatives, dkernels)
            kernel, bias = short.pull(*numbers[1:])
            rounded = kernel.to(self.x.dtype)
            energy = self._strip(p.energy, kernels=torch.cat([rounded, (kernel - rounded).to(self.x.dtype)], 1))
        strips, back = (self._strip(of) if N else near for of in (p.each, p.back))
        numbers = numbers[:, p.long].contiguous()
        size = max(1, min(self.C, SLICE_BYTES // max(1, N * self.B * self.time * self.x.element_size())))
        scratch = self.x.new_empty(N * size * self.B * self.time)
        for c0 in range(0, self.C, size):
            C = min(size, self.C - c0)
            dc = scratch[: N * C * self.B * self.time].view(N, C, self.B, self.time)
            if N:
                self._branches(strips, numbers, dc, g, c0, C)
            _back_kernel[(self.grid.tiles * C,)](
                dc, g, self.x, back, p.back.groups, near, p.near.groups, energy, p.energy.groups, bias, du, N, self.C,
                c0, self.B, self.time // 16, *self.grid, SHORT=short is not None, **rows.products(self.x.dtype, TILE),
            )  # fmt: skip
            if N:
                self._correlate(dc, p.own, dkernels[c0 : c0 + C], c0)
        if short:
            short.add_edges(du)
        out = torch.empty_like(like)
        rows.copy_rows(out, du.transpose(0, 1), False)
        return out, dkernels
