"""Branches of dense kernels as products with Toeplitz matrices, on the tensor cores; by Triton, in bfloat16.

Time blocks, strips and products are those of `toeplitz_conv`, with a strip for each long branch; short branches are in
`short_toeplitz_triton.py`. The outputs of a long branch stay in registers, where they become its statistics or, in the
backward pass, its gradient dc_b. dc_b is stored, for some channels at a time, for two products. One is dc_b with the
reversed kernel, summed over branches: du. The other gives the kernel's gradient: for two squares of time p and p + d,
the sum over p and all sequences of u[p, i] dc_b[p + d, j] is a matrix whose diagonal j - i = e belongs to lag
d SQUARE + e. The factors of all products are bfloat16; sums and statistics are float32 or float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

import triton

from .._common import INTERPRETED
from .._triton import sum_parts
from ..toeplitz_conv import triton_kernels as toeplitz
from ..toeplitz_conv.triton_kernels import Tile, add_products, grid_of, margins, reached, time_blocks
from .op import SHORT_BRANCH
from .short_toeplitz_triton import ShortBranches, ShortPlan, short_plan

TILE = Tile(128, 128, 32, 4, 4)  # of all passes over the branches: the fastest of those tried on an H200
CORRELATE = {"STAGES": 3, "num_warps": 4}
SQUARE = 64  # positions along each side of the products that are summed along diagonals
SLICE_BYTES = 512 * 2**20  # of the branches' gradients in memory at a time, about
STRIP_BLOCK = 512  # lags that are written to a strip at a time
TAP_BLOCK = 1024  # taps per program that adds their two parts


@triton.jit
def _group(groups, n):  # type: ignore[no-untyped-def]
    """Return the first lag, the width and the start of strip n, and the range of chunks that it reaches."""
    at = groups + 7 * n
    return (
        tl.load(at + 2) * 16, tl.load(at + 3) * 16, tl.load(at + 4).to(tl.int64) * 16, tl.load(at + 5), tl.load(at + 6),
    )  # fmt: skip


@triton.jit(do_not_specialize=["C", "taps"])
def _strips_kernel(  # type: ignore[no-untyped-def]
    kernels, factors, skip, strips, branches, groups, C, taps,
    FACTORS: tl.constexpr, SKIP: tl.constexpr, REVERSE: tl.constexpr, COPIES: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Write one copy of one channel's strip of a group of branches: their weighted sum, and the skip."""
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


@triton.jit(do_not_specialize=["C", "c0", "B", "L", "time", "padded_batch", "blocks", "tiles", "chunks"])
def _branches_kernel(  # type: ignore[no-untyped-def]
    x, g, strips, groups, lengths, normalization, out, C, c0, B, L, time, padded_batch, blocks, tiles, chunks,
    MASKED: tl.constexpr, BACKWARD: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store for one branch in a tile the sums of its outputs and of their squares or, if BACKWARD, s g - a - q c."""
    N = tl.num_programs(1)
    n = N - 1 - tl.program_id(1)
    here = tl.program_id(0) // tiles
    c = (c0 + here).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    block, b, real, earliest, latest = time_blocks(tile, padded_batch, B, blocks, BLOCKS)
    low, width, start, begin, end = _group(groups, n)
    sequence = (c * B + b)[:, None] * time * 16
    total = add_products(
        tl.zeros([BLOCKS, BLOCK], tl.float32), x + sequence, strips + (start * C + c * width) * COPIES, width, -low,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = real[:, None] & (at < L)
    if MASKED:
        valid = real[:, None] & (at < tl.load(lengths + b, real, 0).to(tl.int32)[:, None])
    if BACKWARD:
        s = tl.load(normalization + n * C + c)
        q = tl.load(normalization + (N + n) * C + c)
        a = tl.load(normalization + (2 * N + n) * C + c)
        grad = tl.load(g + sequence + at, real[:, None], 0.0).to(tl.float32)
        total = tl.where(valid, s * grad - a - q * total, 0.0)
        signal = ((tl.num_programs(0) // tiles).to(tl.int64) * n + here) * B + b
        tl.store(out + signal[:, None] * time * 16 + at, total.to(out.dtype.element_ty), real[:, None])
    else:
        total = tl.where(valid, total, 0.0)
        out += (tile.to(tl.int64) * 2 * N + n) * C + c
        tl.store(out, tl.sum(tl.sum(total, 1), 0))
        tl.store(out + N * C, tl.sum(tl.sum(total * total, 1), 0))


@triton.jit(do_not_specialize=["N", "C", "c0", "B", "time", "padded_batch", "blocks", "tiles", "chunks"])
def _input_gradient_kernel(  # type: ignore[no-untyped-def]
    dc, g, x, strips, groups, near, near_group, energy, energy_groups, bias, out,
    N, C, c0, B, time, padded_batch, blocks, tiles, chunks,
    SHORT: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store du: the long branches' gradients times their reversed kernels, plus the contribution of short branches.

    The latter is g times the strip `near`, x times the two strips `energy` (a rounded kernel and its rounding error),
    and a bias.
    """
    here = tl.program_id(0) // tiles
    c = (c0 + here).to(tl.int64)
    tile = tl.program_id(0) % tiles
    block, b, real, earliest, latest = time_blocks(tile, padded_batch, B, blocks, BLOCKS)
    sequence = (c * B + b)[:, None] * time * 16
    low, width, start, begin, end = _group(near_group, 0)
    total = add_products(
        tl.zeros([BLOCKS, BLOCK], tl.float32), g + sequence, near + c * width * COPIES, width, -low,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    if SHORT:
        total += tl.load(bias + c)
        for n in range(2):
            low, width, start, begin, end = _group(energy_groups, n)
            total = add_products(
                total, x + sequence, energy + (start * C + c * width) * COPIES, width, -low,
                begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
            )  # fmt: skip
    for n in range(N):
        low, width, start, begin, end = _group(groups, n)
        signal = ((tl.num_programs(0) // tiles).to(tl.int64) * n + here) * B + b
        total = add_products(
            total, dc + signal[:, None] * time * 16, strips + (start * C + c * width) * COPIES, width, -low,
            begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
        )  # fmt: skip
    at = sequence + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, total, real[:, None])


@triton.jit(do_not_specialize=["C", "c0", "B", "time", "blocks", "pairs"])
def _correlate_kernel(  # type: ignore[no-untyped-def]
    x, dc, which, out, C, c0, B, time, blocks, pairs,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the sums along the diagonals of the products of squares, for a channel, a branch and a distance."""
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
        sequence = k % sequences * BATCH + b
        at = sequence[:, None].to(tl.int64) * time * 16 + (first + k // sequences) * BLOCK + i[None, :]
        v = tl.load(mine + at, (sequence < B)[:, None], 0.0)
        w = tl.load(there + at, (sequence < B)[:, None], 0.0)
        if WIDE:
            v, w = v.to(tl.float32), w.to(tl.float32)
        total = tl.dot(tl.trans(v), w, total, input_precision=PRECISION)
    column = i[:, None] + i[None, :]
    turned = tl.gather(total, column % BLOCK, 1)  # column e holds the diagonals e and e - BLOCK
    out += tl.program_id(0).to(tl.int64) * 2 * BLOCK + i
    tl.store(out, tl.sum(tl.where(column < BLOCK, 0.0, turned), 0))
    tl.store(out + BLOCK, tl.sum(tl.where(column < BLOCK, turned, 0.0), 0))


@triton.jit(do_not_specialize=["taps", "width", "stride"])
def _taps_kernel(diagonals, parts, out, taps, width, stride, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sum of each tap's two parts at the tap's position."""
    c = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BL + tl.arange(0, BL)
    near = tl.load(diagonals + c * width + tl.load(parts + j, j < taps, 0), j < taps, 0.0)
    far = tl.load(diagonals + c * width + tl.load(parts + taps + j, j < taps, 0), j < taps, 0.0)
    tl.store(out + c * stride + tl.load(parts + 2 * taps + j, j < taps, 0), near + far, j < taps)


@dataclass(frozen=True)
class Strips:
    """Strips of sums of branches: indices on the device, and the total width of all strips."""

    branches: Tensor  # (branches, 3): the first tap, the number of taps, whether it is anticausal
    groups: Tensor  # (groups, 7): first branch, number of branches; first lag, width, start; first and last chunk
    width: int
    reverse: bool


@dataclass(frozen=True)
class Correlations:
    """Pairs (branch, distance of squares), and the positions of each tap's two parts in their diagonals."""

    pairs: Tensor  # (pairs, 2)
    parts: Tensor  # (3, taps): positions of the two parts, and of their sum


@dataclass(frozen=True)
class Plan:
    """Constants of the branches, on a device."""

    members: Tensor  # (taps, N): 1 where a tap belongs to a branch
    short: ShortPlan | None
    long: Tensor  # indices of the long branches
    each: Strips  # of each long branch
    back: Strips  # of each long branch, reversed
    merged: Strips  # of the sum of all branches
    near: Strips  # of the sum of the short branches, reversed
    energy: Strips  # of a kernel at lags 1 - N .. N - 1, rounded, and of its rounding error
    lags: tuple[int, int]  # of the merged kernel, lowest and highest
    branch: Correlations  # of u with each long branch's gradient
    cross: Correlations  # of u with the output's gradient, at the lags of all taps and at 0
    auto: Correlations  # of u with itself, at the lags of short branches


def _lags(size: int, anticausal: bool) -> range:
    return range(-1, -1 - size, -1) if anticausal else range(size)


def _strips(branches: Tensor, kernels: Sequence[tuple[int, int, int, int]], reverse: bool = False) -> Strips:
    """Return strips for groups (first branch, number of branches, lowest lag, highest lag)."""
    numbers, width = [], 0
    for first, count, low, high in kernels:
        low, high = (-high, -low) if reverse else (low, high)
        start, units = margins(low, high, TILE)
        numbers.append((first, count, start, units, width, *reached(low, high, TILE)))
        width += units
    return Strips(branches, torch.tensor(numbers, dtype=torch.int32, device=branches.device), width * 16, reverse)


def _correlations(
    kernels: Sequence[tuple[int, range]], blocks: int, device: torch.device, positions: Sequence[int] | None = None
) -> Correlations:
    """Return the correlations that give all taps of kernels (branch, lags), in order or at their positions.

    Lags beyond the input get zeros.
    """
    squares: dict[tuple[int, int], int] = {}
    block, within = SQUARE, blocks * TILE.block // SQUARE
    parts: list[tuple[int, int, int]] = []
    for n, lags in kernels:
        for lag in lags:
            near, e = divmod(lag, block)
            diagonals = []
            for d, diagonal in ((near, e), (near + 1, e - block)):
                if diagonal > -block and abs(d) < within:
                    diagonals.append(2 * block * squares.setdefault((n, d), len(squares)) + block + diagonal)
            position = len(parts) if positions is None else positions[len(parts)]
            first, second = (*diagonals, 0, 0)[:2]  # diagonal 0 of a square is always zero
            parts.append((first, second, position))
    return Correlations(
        torch.tensor(list(squares), dtype=torch.int32, device=device),
        torch.tensor(parts, dtype=torch.int32, device=device).reshape(-1, 3).t().contiguous(),
    )


def plan_for(sizes: Sequence[int], causal: int, L: int, device: torch.device) -> Plan:
    """Return the plan for branches of these sizes, the first `causal` of them causal, and inputs of length L.

    Many lengths share a plan. Branches are short only for inputs at least eight times as long, because the sums beyond
    an edge of the input are first added and then subtracted.
    """
    blocks = min(triton.cdiv(L, TILE.block), triton.cdiv(max(sizes), TILE.block) + 1)
    return _plan(tuple(sizes), causal, blocks, min(SHORT_BRANCH, L // 128 * 16), device)


@functools.lru_cache(maxsize=1024)
def _plan(sizes: tuple[int, ...], causal: int, blocks: int, limit: int, device: torch.device) -> Plan:
    with torch.inference_mode(False):
        nb, starts = len(sizes), [0, *itertools.accumulate(sizes)]
        lags = [_lags(size, n >= causal) for n, size in enumerate(sizes)]
        reachable = [each[: blocks * TILE.block] for each in lags]
        few, many = ([n for n in range(nb) if (0 < sizes[n] <= limit) == is_short] for is_short in (True, False))
        members = torch.repeat_interleave(torch.eye(nb, dtype=torch.float64), torch.tensor(sizes), 0).to(device)
        short = short_plan(few, sizes, causal, members) if few else None
        N = short.N if short else 1

        def ends(which: Sequence[int]) -> tuple[int, int]:
            every = [0, *(lag for n in which for lag in (*reachable[n][:1], *reachable[n][-1:]))]
            return min(every), max(every)

        def table(branches: Sequence[tuple[int, int, bool]]) -> Tensor:
            return torch.tensor(branches, dtype=torch.int32, device=device)

        branches = table([(starts[n], sizes[n], n >= causal) for n in range(nb)])
        each = [(n, 1, min(reachable[n], default=0), max(reachable[n], default=0)) for n in many]
        two_sided = table([(n, size, n % N > 0) for start in (0, N) for n, size in ((start, N), (start + 1, N - 1))])
        long_taps = [j for n in many for j in range(starts[n], starts[n + 1])]
        return Plan(
            members=members,
            short=short,
            long=torch.tensor(many, dtype=torch.int64, device=device),
            each=_strips(branches, each),
            back=_strips(branches, each, True),
            merged=_strips(branches, [(0, nb, *ends(range(nb)))]),
            near=_strips(branches, [(0, nb, *ends(few))], True),
            energy=_strips(two_sided, [(first, 2, 1 - N, N - 1) for first in (0, 2)]),
            lags=ends(range(nb)),
            branch=_correlations([(k, lags[n]) for k, n in enumerate(many)], blocks, device, long_taps),
            cross=_correlations([(0, each) for each in (*lags, range(1))], blocks, device),
            auto=_correlations([(0, range(N))], blocks, device),
        )


class ToeplitzBranches:
    """Branches over u (B, C, L) with dense kernels (C, sum of sizes), the first `causal` of them causal."""

    heights = None

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, sizes: Sequence[int], causal: int) -> None:
        self.B, self.C, self.L = u.shape
        self.u, self.plan = u, plan_for(sizes, causal, self.L, u.device)
        self.saved_taps = sum(size for size in sizes if size <= SHORT_BRANCH)
        self.kernels, self.x, self.lengths = kernels.to(u.dtype).contiguous(), self._time_contiguous(u), lengths
        self.time, self.grid = self.x.shape[2], grid_of(self.B, self.L, TILE)
        short = self.plan.short
        self.short = short and ShortBranches(self.x, self.kernels, short, self.L, lengths)

    def _time_contiguous(self, u: Tensor) -> Tensor:
        """Return u (B, C, L) contiguous as (C, B, time), padded with zeros to whole blocks."""
        x = toeplitz.time_contiguous_empty(u, TILE.block)
        toeplitz.copy_time_contiguous(u, x, True)
        return x.transpose(0, 1)

    def _strip(
        self, of: Strips, factors: Tensor | None = None, skip: Tensor | None = None, kernels: Tensor | None = None
    ) -> Tensor:
        """Return strips (C, copies, width) of all groups, each of its own width, concatenated."""
        kernels = self.kernels if kernels is None else kernels
        out = self.x.new_empty(self.C * toeplitz.COPIES * of.width)
        _strips_kernel[(self.C, toeplitz.COPIES, len(of.groups))](
            kernels, kernels if factors is None else factors, kernels if skip is None else skip, out, of.branches,
            of.groups, self.C, kernels.shape[1], FACTORS=factors is not None, SKIP=skip is not None, REVERSE=of.reverse,
            COPIES=toeplitz.COPIES, BL=STRIP_BLOCK,
        )  # fmt: skip
        return out

    def _branches(self, strips: Tensor, normalization: Tensor, out: Tensor, g: Tensor | None, c0: int, C: int) -> None:
        """Compute the long branches of C channels from c0 on: their moments or, with g, their dc."""
        _branches_kernel[(self.grid.tiles * C, len(self.plan.long))](
            self.x, self.x if g is None else g, strips, self.plan.each.groups,
            self.x if self.lengths is None else self.lengths, normalization, out, self.C, c0, self.B, self.L,
            self.time // 16, *self.grid, MASKED=self.lengths is not None, BACKWARD=g is not None,
            **toeplitz.product_options(self.x.dtype, TILE),
        )  # fmt: skip

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the sums of c_b and of c_b^2, (1, 2, N, C), and the derivatives of the short branches' sums.

        The latter, (2, C, taps), are those of the sums of c_b and of c_b^2 / 2 with respect to the taps.
        """
        with torch.autocast(self.u.device.type, enabled=False):
            sums, derivatives = self._moments()
        return sums[None], F.pad(derivatives, (0, self.saved_taps - derivatives.shape[2]))

    def _moments(self) -> tuple[Tensor, Tensor]:
        sums = self.x.new_empty(2, self.plan.members.shape[1], self.C, dtype=torch.float64)
        derivatives = self.x.new_empty(2, self.C, 0, dtype=torch.float32)
        if self.short:
            correlation = self._correlate(self.x[None], self.plan.auto, self._empty_taps(self.short.plan.N))
            derivatives = self.short.derivatives(correlation)
            each = (self.kernels[:, self.short.plan.taps] * derivatives).double() @ self.short.plan.members
            sums = each.transpose(1, 2).contiguous()
        if len(self.plan.long):
            parts = self.x.new_empty(self.grid.tiles, 2, len(self.plan.long), self.C, dtype=torch.float32)
            self._branches(self._strip(self.plan.each), parts, parts, None, 0, self.C)
            sums[:, self.plan.long] = sum_parts(parts).to(sums.dtype)
        return sums, derivatives

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, as one convolution."""
        y, p = torch.empty_like(self.u), self.plan
        out = toeplitz.time_contiguous_empty(self.u, TILE.block)
        strip = self._strip(p.merged, scale, skip).view(self.C, toeplitz.COPIES, -1)
        x = self.x.transpose(0, 1)
        toeplitz.conv_time_contiguous(x, strip, None, shift.sum(0), out, self.L, *p.lags, False, TILE)
        toeplitz.copy_time_contiguous(y, out, False)
        return y

    def _correlate(self, dc: Tensor, of: Correlations, out: Tensor, c0: int = 0) -> Tensor:
        """Write the correlations of u with dc (branches, channels from c0 on, B, time) to out (channels, taps)."""
        C, pairs, taps = dc.shape[1], len(of.pairs), of.parts.shape[1]
        diagonals = dc.new_empty(C, pairs * 2 * SQUARE, dtype=torch.float32)
        batch = min(64, max(16, triton.next_power_of_2(self.B)))
        _correlate_kernel[(C * pairs,)](
            self.x, dc, of.pairs, diagonals, C, c0, self.B, self.time // 16, self.time // SQUARE, pairs,
            WIDE=INTERPRETED, PRECISION="ieee" if INTERPRETED else "tf32", BLOCK=SQUARE, BATCH=batch, **CORRELATE,
        )  # fmt: skip
        _taps_kernel[(C, triton.cdiv(taps, TAP_BLOCK))](
            diagonals, of.parts, out, taps, diagonals.shape[1], out.stride(0), BL=TAP_BLOCK
        )
        return out

    def _empty_taps(self, count: int) -> Tensor:
        return self.x.new_empty(self.C, count, dtype=torch.float32)

    def products(self, grad: Tensor) -> Tensor:
        """Return the sums over batch and time, (1, N + 2, C), of g c_b, of g and of g u."""
        self.g = g = self._time_contiguous(grad.to(self.u.dtype))
        self.cross = self._correlate(g[None], self.plan.cross, self._empty_taps(1 + self.kernels.shape[1]))
        inner = (self.kernels * self.cross[:, :-1]).double() @ self.plan.members
        g_sum = g.sum((1, 2), dtype=torch.float32)
        return torch.cat([inner.t(), g_sum[None], self.cross[None, :, -1]])[None]

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b."""
        with torch.autocast(self.u.device.type, enabled=False):
            du, dkernels = self._gradients(torch.stack([s, q, a]), skip, saved)
        out = torch.empty_like(self.u)
        toeplitz.copy_time_contiguous(out, du.transpose(0, 1), False)
        return out, dkernels

    def _gradients(self, normalization: Tensor, skip: Tensor | None, derivatives: Tensor) -> tuple[Tensor, Tensor]:
        """Return du (C, B, time) and the kernels' gradient; normalization (3, N, C) are s, q and a.

        Some channels at a time, because dc of all long branches is in memory.
        """
        p, N, short, g = self.plan, len(self.plan.long), self.short, self.g
        du = torch.empty_like(self.x, dtype=torch.float32)
        dkernels = self._empty_taps(self.kernels.shape[1])
        near = self._strip(p.near, normalization[0].index_fill(0, p.long, 0), skip)
        energy, bias = near, near
        if short:
            short.write_gradient(normalization, self.cross, derivatives, dkernels)
            kernel, bias = short.input_gradient(*normalization[1:])
            rounded = kernel.to(self.x.dtype)
            energy = self._strip(p.energy, kernels=torch.cat([rounded, (kernel - rounded).to(self.x.dtype)], 1))
        strips, back = (self._strip(of) if N else near for of in (p.each, p.back))
        normalization = normalization[:, p.long].contiguous()
        size = max(1, min(self.C, SLICE_BYTES // max(1, N * self.B * self.time * self.x.element_size())))
        scratch = self.x.new_empty(N * size * self.B * self.time)
        for c0 in range(0, self.C, size):
            C = min(size, self.C - c0)
            dc = scratch[: N * C * self.B * self.time].view(N, C, self.B, self.time)
            if N:
                self._branches(strips, normalization, dc, g, c0, C)
            _input_gradient_kernel[(self.grid.tiles * C,)](
                dc, g, self.x, back, p.back.groups, near, p.near.groups, energy, p.energy.groups, bias, du, N, self.C,
                c0, self.B, self.time // 16, *self.grid, SHORT=short is not None,
                **toeplitz.product_options(self.x.dtype, TILE),
            )  # fmt: skip
            if N:
                self._correlate(dc, p.branch, dkernels[c0 : c0 + C], c0)
        if short:
            short.add_edges(du)
        return du, dkernels
