"""Branches of dense kernels as products with Toeplitz matrices, on the tensor cores; by Triton, in bfloat16.

Time blocks, strips and products are those of `toeplitz_conv`, with a strip for each long branch; short branches are in
`short_toeplitz_triton.py`. The forward pass computes the outputs c_b of the long branches for their statistics and
keeps them, centred and rounded, for the backward pass. There, with dc_b = s_b g - a_b - q_b c_b,

- the kernels' gradients follow from the correlations of u with g and with every c_b (`toeplitz_taps_triton.py`), and
  from the sums of the inputs that each tap multiplies;
- du is the product of g with the reversed sum of all kernels, plus that of each c_b with its reversed kernel, minus
  the terms of a_b, which depend on the distance from an end of the sequence only.

The factors of all products are bfloat16; sums and statistics are float32 or float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import offsets
from ..toeplitz_conv import triton_kernels as toeplitz
from ..toeplitz_conv.correlation_triton import correlate
from ..toeplitz_conv.triton_kernels import add_products, grid_of, time_blocks
from .short_toeplitz_triton import ShortBranches
from .toeplitz_plan import BRANCH_TILE, TILE, Strips, group, is_long, plan_for
from .toeplitz_taps_triton import TapSums

STRIP_BLOCK = 512  # lags that are written to a strip at a time
STORE = {"BB": 2, "BL": 64, "BC": 64}  # sequences, positions and channels of a program that stores du


@triton.jit(do_not_specialize=["C", "N", "taps"])
def _strips_kernel(  # type: ignore[no-untyped-def]
    kernels, scale, minus, skip, shift, strips, bias, branches, groups, C, N, taps,
    MERGED: tl.constexpr, SKIP: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, REVERSE: tl.constexpr,
    COPIES: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Write a piece of one channel's strip of a group of branches, to all copies.

    If MERGED, the first group is the sum of all branches times `scale`, plus the skip, and SHIFT stores the sum of
    `shift` over all branches. The other groups are one branch each, times -minus if SCALED.
    """
    c = tl.program_id(0).to(tl.int64)
    merged = tl.program_id(2) == 0
    first = tl.load(groups + 7 * tl.program_id(2))
    last = first + tl.load(groups + 7 * tl.program_id(2) + 1)
    low, width, begin, _, _ = group(groups, tl.program_id(2))
    i = tl.program_id(1) * BL + tl.arange(0, BL)
    lag = low + i
    if REVERSE:
        lag = -lag
    total = tl.zeros([BL], tl.float32)
    if SKIP:
        total = tl.where((lag == 0) & merged, tl.load(skip + c).to(tl.float32), total)
    start = low + tl.program_id(1) * BL
    if REVERSE:
        start = 1 - BL - start
    for n in range(first, last):
        anticausal = tl.load(branches + 5 * n + 2) != 0
        size = tl.load(branches + 5 * n + 1)
        nearest = tl.where(anticausal, -start - BL, start)
        if (nearest < size) & (nearest + BL > 0):
            j = tl.where(anticausal, -1 - lag, lag)
            factor = 1.0
            if MERGED:
                factor = tl.load(scale + n * C + c, merged, 1.0).to(tl.float32)
            if SCALED:
                factor *= tl.where(merged, 1.0, -tl.load(minus + n * C + c).to(tl.float32))
            at = kernels + c * taps + tl.load(branches + 5 * n) + j
            total += factor * tl.load(at, (j >= 0) & (j < size), 0.0).to(tl.float32)
    out = strips + (begin * C + c * width) * COPIES + i
    for r in range(COPIES):
        tl.store(out + r * width + r, total.to(strips.dtype.element_ty), i + r < width)
        tl.store(out + r * width, tl.zeros([BL], strips.dtype.element_ty), i < r)
    if SHIFT:
        added = 0.0
        for n in range(tl.where(tl.program_id(1) == 0, N, 0)):
            added += tl.load(shift + n * C + c).to(tl.float32)
        tl.store(bias + c, added, tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["N", "C", "B", "L", "time", "blocks", "tiles", "chunks"])
def _branches_kernel(  # type: ignore[no-untyped-def]
    x, strips, groups, means, lengths, outputs, parts, N, C, B, L, time, blocks, tiles, chunks,
    MASKED: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store one long branch in a tile, centred, and the sums of its outputs and of their squares."""
    n = tl.num_programs(1) - 1 - tl.program_id(1)
    c = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    block, b, real, earliest, latest = time_blocks(tile, B, blocks, tiles, BLOCKS)
    low, width, start, begin, end = group(groups, n)
    total = add_products(
        tl.zeros([BLOCKS, BLOCK], tl.float32), x + (c * B + b)[:, None] * time * 16,
        strips + (start * C + c * width) * COPIES, width, -low,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    end = tl.zeros([BLOCKS], tl.int32) + L
    if MASKED:
        end = tl.load(lengths + b, real, 0).to(tl.int32)
    end = tl.where(real, end - block * BLOCK, 0)
    i = tl.arange(0, BLOCK)[None, :]
    mean = tl.load(means + n * C + c)
    total = tl.where(i < end[:, None], total - mean, 0.0)
    outputs += ((c + n * C) * B + b)[:, None] * time * 16 + block[:, None] * BLOCK
    tl.store(outputs + i, total.to(outputs.dtype.element_ty), real[:, None])
    added = tl.sum(tl.sum(total, 1), 0).to(tl.float64)
    squares = tl.sum(tl.sum(total * total, 1), 0).to(tl.float64)
    count = tl.sum(tl.minimum(tl.maximum(end, 0), BLOCK), 0).to(tl.float64)
    mean = mean.to(tl.float64)
    parts += (tile.to(tl.int64) * 2 * N + tl.load(groups + 7 * n)) * C + c
    tl.store(parts, added + count * mean)
    tl.store(parts + N * C, squares + mean * (2 * added + count * mean))


@triton.jit(do_not_specialize=["N", "C", "B", "time", "blocks", "tiles", "chunks"])
def _input_gradient_kernel(  # type: ignore[no-untyped-def]
    g, outputs, x, strips, groups, energy, energy_groups, out, N, C, B, time, blocks, tiles, chunks,
    SHORT: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store du, but for the terms of a_b and the short branches' corrections at the edges.

    `energy` are the strips of the short branches' even kernel, which is applied to x: rounded, and the rounding error.
    """
    c = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    block, b, real, earliest, latest = time_blocks(tile, B, blocks, tiles, BLOCKS)
    sequence = (c * B + b)[:, None] * time * 16
    low, width, start, begin, end = group(groups, 0)
    total = add_products(
        tl.zeros([BLOCKS, BLOCK], tl.float32), g + sequence, strips + (start * C + c * width) * COPIES, width, -low,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    if SHORT:
        for n in range(2):
            low, width, start, begin, end = group(energy_groups, n)
            total = add_products(
                total, x + sequence, energy + (start * C + c * width) * COPIES, width, -low,
                begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
            )  # fmt: skip
    for n in range(N):
        low, width, start, begin, end = group(groups, n + 1)
        signal = outputs + ((c + n * C) * B + b)[:, None] * time * 16
        total = add_products(
            total, signal, strips + (start * C + c * width) * COPIES, width, -low,
            begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
        )  # fmt: skip
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + sequence + at, total, real[:, None])


@triton.jit
def _heights(heights, c, t, length, directions, first, longest):  # type: ignore[no-untyped-def]
    """Return the terms of a_b in du at positions t and channels c of a sequence."""
    total = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    for direction in range(directions):
        reached = tl.where(first + direction == 0, length - t, t)
        reached = tl.minimum(tl.maximum(reached, 0), longest)
        total += tl.load(heights + (c * directions + direction)[None, :] * (longest + 1) + reached[:, None])
    return total


@triton.jit(do_not_specialize=["B", "C", "L", "units", "directions", "first", "longest"])
def _store_gradient_kernel(  # type: ignore[no-untyped-def]
    du, heights, edges, lengths, out, B, C, L, units, directions, first, longest, o_b, o_c, o_l,
    MASKED: tl.constexpr, EDGE: tl.constexpr, BB: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store du (C, B, time), minus the terms of a_b, plus the corrections `edges`, to out (B, C, L)."""
    block = tl.program_id(2) * BL
    t = block + tl.arange(0, BL)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    exists = tl.minimum(c, C - 1)
    terms = _heights(heights, exists, t, L, directions, first, longest)
    start = tl.program_id(0).to(tl.int64) * BB
    for k in range(tl.minimum(BB, B - start)):
        b = start + k
        sequence = exists * B + b
        total = tl.load(du + (sequence * units * 16)[None, :] + t[:, None])
        length = L
        if MASKED:
            length = tl.load(lengths + b).to(tl.int32)
            terms = _heights(heights, exists, t, length, directions, first, longest)
        total -= terms
        if EDGE:
            for direction in range(directions):
                causal = first + direction == 0
                nearest = tl.where(causal, length - block - BL + 1, block)
                if (nearest < EDGE) & (nearest + BL > 0):
                    n = tl.where(causal, length - t, t)
                    here = ((exists * directions + direction) * B + b) * EDGE
                    total += tl.load(edges + here[None, :] + n[:, None], ((n >= 0) & (n < EDGE))[:, None], 0.0)
        inside = (t < L)[:, None] & (c < C)[None, :]
        tl.store(out + b * o_b + offsets(t, c, o_l, o_c), total.to(out.dtype.element_ty), inside)


def saved_numbers(u: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return how many float32 numbers each part of the saved tensor takes.

    The parts are the outputs of the long branches (bfloat16), their means, the sums of the inputs at each tap, and the
    energies' derivatives of the short branches.
    """
    B, C, L = u.shape
    long = sum(map(is_long, sizes))
    time = -(-L // TILE.block) * TILE.block
    return [long * C * B * time // 2, long * C, 2 * C * max(sizes), C * sum(n for n in sizes if not is_long(n))]


class ToeplitzBranches:
    """Branches over u (B, C, L) with dense kernels (C, sum of sizes), the first `causal` of them causal."""

    heights = None

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, sizes: Sequence[int], causal: int) -> None:
        self.B, self.C, self.L = u.shape
        self.u, self.kernels, self.plan = u, kernels.contiguous(), plan_for(sizes, causal, self.L, u.device)
        self.x, self.numbers = self._time_contiguous(u), saved_numbers(u, sizes)
        self.time, self.grid = self.x.shape[2], grid_of(self.B, self.L, TILE)
        self.lengths = self.x if lengths is None else lengths
        self.masked = lengths is not None
        batch = self.x, self.kernels, self.plan, self.L, lengths
        self.sums, self.short = TapSums(*batch), ShortBranches(*batch) if self.plan.edge else None

    def _time_contiguous(self, u: Tensor) -> Tensor:
        """Return u (B, C, L) contiguous as (C, B, time), padded with zeros to whole blocks."""
        return toeplitz.time_contiguous(u, TILE.block).transpose(0, 1)

    def _parts(self, saved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return outputs (long, C, B, time), means (long, C), sums of inputs by tap, and derivatives of energies."""
        outputs, *others = saved.split(self.numbers)
        return outputs.view(self.x.dtype).view(len(self.plan.long), self.C, self.B, self.time), *others

    def _strips(
        self, of: Strips, scale: Tensor | None = None, skip: Tensor | None = None, shift: Tensor | None = None,
        minus: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return strips (C, copies, width) of all groups, each of its own width, concatenated; and the summed shift."""
        out, bias = self.x.new_empty(self.C * toeplitz.COPIES * of.width), self.x.new_empty(self.C, dtype=torch.float32)
        _strips_kernel[(self.C, triton.cdiv(of.widest, STRIP_BLOCK), len(of.groups))](
            self.kernels, *(self.kernels if z is None else z for z in (scale, minus, skip, shift)), out, bias,
            self.plan.branches, of.groups, self.C, len(self.plan.branches), self.kernels.shape[1],
            MERGED=scale is not None, SKIP=skip is not None, SHIFT=shift is not None, SCALED=minus is not None,
            REVERSE=of.reverse, COPIES=toeplitz.COPIES, BL=STRIP_BLOCK,
        )  # fmt: skip
        return out, bias

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return partial sums of c_b and of c_b^2, (P, 2, N, C), and the tensor saved for `gradients`."""
        p, saved = self.plan, self.x.new_empty(sum(self.numbers), dtype=torch.float32)
        outputs, means, inputs, energies = self._parts(saved)
        N, grid = len(p.branches), grid_of(self.B, self.L, BRANCH_TILE)
        parts = self.x.new_empty(max(1, grid.tiles) if p.long else 1, 2, N, self.C, dtype=torch.float64)
        if not self.B:
            return parts.zero_(), saved.zero_()
        self.sums.write_inputs(inputs)
        if self.short:
            self.short.moments(correlate(self.x, self.x[None], p.auto), inputs, energies, parts)
        if p.long:
            self.sums.write_means(inputs, means)
            strips, _ = self._strips(p.each)
            _branches_kernel[(grid.tiles * self.C, len(p.long))](
                self.x, strips, p.each.groups, means, self.lengths, outputs, parts, N, self.C, self.B, self.L,
                self.time // 16, *grid, MASKED=self.masked, **toeplitz.product_options(self.x.dtype, BRANCH_TILE),
            )  # fmt: skip
        return parts, saved

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, as one convolution."""
        y, out = torch.empty_like(self.u), toeplitz.time_contiguous_empty(self.u, TILE.block)
        strip, bias = self._strips(self.plan.merged, scale, skip, shift)
        toeplitz.conv_time_contiguous(
            self.x.transpose(0, 1), strip.view(self.C, toeplitz.COPIES, -1), None, bias, out, self.L, *self.plan.lags,
            False, TILE,
        )  # fmt: skip
        toeplitz.copy_time_contiguous(y, out, False)
        return y

    def products(self, grad: Tensor) -> Tensor:
        """Return the sums over batch and time, (1, N + 2, C), of g c_b, of g and of g u."""
        self.g = self._time_contiguous(grad.to(self.u.dtype))
        self.cross = correlate(self.x, self.g[None], self.plan.cross)
        return self.sums.products(self.g, self.cross)

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b."""
        p, du, out = self.plan, torch.empty_like(self.x, dtype=torch.float32), torch.empty_like(self.u)
        outputs, means, inputs, energies = self._parts(saved)
        strips, _ = self._strips(p.back, s, skip, None, q)
        energy, edges = self.short.input_gradient(q) if self.short else (strips, means)
        _input_gradient_kernel[(self.grid.tiles * self.C,)](
            self.g, outputs, self.x, strips, p.back.groups, energy, p.energy.groups, du, len(p.long), self.C, self.B,
            self.time // 16, *self.grid, SHORT=self.short is not None, **toeplitz.product_options(self.x.dtype, TILE),
        )  # fmt: skip
        grid = triton.cdiv(self.B, STORE["BB"]), triton.cdiv(self.C, STORE["BC"]), triton.cdiv(self.L, STORE["BL"])
        _store_gradient_kernel[grid](
            du, self.sums.heights(a, q, means), edges, self.lengths, out, self.B, self.C, self.L, self.time // 16,
            p.directions, p.first, p.longest, *out.stride(), MASKED=self.masked, EDGE=p.edge, **STORE,
        )  # fmt: skip
        return out, self.sums.gradient(self.cross, outputs, energies, inputs, means, s, q, a)
