"""Sums of the Toeplitz algorithm that belong to taps: of their inputs, correlations, gradients; by Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

import triton

from ..toeplitz_conv.correlation_triton import SQUARE, correlate, correlation
from .toeplitz_plan import Plan

TAP_BLOCK = 1024  # taps at a time
SUMS = {"BB": 16, "BL": 256}  # sequences and positions at a time
PARTS = 8  # of the sum of g


@triton.jit
def edge_offsets(lengths, c, b, n, B, L, units, anticausal, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets in x (C, B, time) of values n next to an edge of sequences b, and which of them exist.

    `anticausal` is 0 for the end of the sequences, 1 for their start.
    """
    length = tl.load(lengths + b, b < B, 0).to(tl.int32)[:, None] if MASKED else L
    t = tl.where(anticausal != 0, n[None, :], length - n[None, :])
    return (c * B + b)[:, None] * units * 16 + t, (b < B)[:, None] & (t >= 0) & (t < length)


@triton.jit(do_not_specialize=["B", "L", "units", "directions", "first"])
def _batch_sums_kernel(  # type: ignore[no-untyped-def]
    x, lengths, out, B, L, units, directions, first, MASKED: tl.constexpr, BB: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store the sums over all sequences of some of the values next to an edge, 0 .. L, of one channel."""
    c = tl.program_id(0).to(tl.int64)
    i = tl.program_id(2) * BL + tl.arange(0, BL)
    total = tl.zeros([BB, BL], tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        t = i[None, :]
        if MASKED:  # align the sequences at the edge
            length = tl.load(lengths + b, b < B, 0).to(tl.int32)[:, None]
            t += tl.where(first + tl.program_id(1) != 0, 0, length - L)
        inside = (b < B)[:, None] & (t >= 0) & (t < L)
        total += tl.load(x + ((c * B + b) * units * 16)[:, None] + t, inside, 0.0).to(tl.float32)
    added = tl.sum(total, 0)
    for direction in range(tl.program_id(1), directions, tl.num_programs(1)):
        n = tl.where(first + direction != 0, i, L - i)
        tl.store(out + (c * directions + direction) * (L + 1) + n, added, (n >= 0) & (n <= L))


@triton.jit(do_not_specialize=["L", "taps"])
def _input_sums_kernel(values, out, L, taps, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums over batch and time of the inputs that each tap multiplies, for one channel and direction.

    Tap j multiplies all inputs but the first j + 1 of the values next to the edge, 0 .. L.
    """
    index = tl.program_id(0).to(tl.int64)
    values += index * (L + 1)
    total = tl.zeros([BL], tl.float32)
    for start in range(0, L + 1, BL):
        n = start + tl.arange(0, BL)
        total += tl.load(values + n, n <= L, 0.0)
    rest = tl.sum(total, 0)
    for start in range(0, taps, BL):
        n = start + tl.arange(0, BL)
        beyond = tl.load(values + n, n <= L, 0.0)
        tl.store(out + index * taps + n, rest - tl.cumsum(beyond, 0), n < taps)
        rest -= tl.sum(beyond, 0)


@triton.jit(do_not_specialize=["C", "B", "L", "taps", "directions", "first", "longest"])
def _means_kernel(  # type: ignore[no-untyped-def]
    kernels, inputs, lengths, branches, groups, out, C, B, L, taps, directions, first, longest,
    MASKED: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store the mean of one long branch in one channel."""
    c = tl.program_id(0).to(tl.int64)
    n = tl.load(groups + 7 * tl.program_id(1))
    count = (B * L).to(tl.float32)
    if MASKED:
        ends = tl.zeros([BL], tl.float32)
        for start in range(0, B, BL):
            b = start + tl.arange(0, BL)
            ends += tl.load(lengths + b, b < B, 0).to(tl.float32)
        count = tl.maximum(tl.sum(ends, 0), 1.0)
    total = tl.zeros([BL], tl.float32)
    size = tl.load(branches + 5 * n + 1)
    inputs += (c * directions + tl.load(branches + 5 * n + 2) - first) * longest
    kernels += c * taps + tl.load(branches + 5 * n)
    for start in range(0, size, BL):
        j = start + tl.arange(0, BL)
        total += tl.load(kernels + j, j < size, 0.0).to(tl.float32) * tl.load(inputs + j, j < size, 0.0)
    tl.store(out + tl.program_id(1) * C + c, tl.sum(total, 0) / count)


@triton.jit(do_not_specialize=["N", "C", "B", "time", "taps", "width"])
def _products_kernel(  # type: ignore[no-untyped-def]
    kernels, g, diagonals, table, branches, out, N, C, B, time, taps, width,
    BLOCK: tl.constexpr, BL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store one of the sums for one channel: of g c_b for each branch, of g u, then the parts of the sum of g."""
    c = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    i = tl.arange(0, BL)
    out += c
    diagonals += c * width
    total = tl.zeros([BL], tl.float32)
    if n < N:
        size = tl.load(branches + 5 * n + 1)
        kernels += c * taps + tl.load(branches + 5 * n)
        for start in range(0, size, BL):
            j = start + i
            lag = tl.where(tl.load(branches + 5 * n + 2) != 0, -1 - j, j)
            v = tl.load(kernels + j, j < size, 0.0).to(tl.float32)
            total += v * correlation(diagonals, table, lag, j < size, BLOCK)
        tl.store(out + n * C, tl.sum(total, 0))
    elif n == N:
        total = correlation(diagonals, table, i, i == 0, BLOCK)
        tl.store(out + (N + 1) * C, tl.sum(total, 0))
    else:
        part = n - N - 1
        for start in range(part * BL, B * time * 16, PARTS * BL):
            total += tl.load(g + c * B * time * 16 + start + i, start + i < B * time * 16, 0.0).to(tl.float32)
        out += part * (N + 2) * C
        tl.store(out + N * C, tl.sum(total, 0))
        for other in range(tl.where(part > 0, N + 2, 0)):
            tl.store(out + other * C, 0.0, other != N)


@triton.jit(do_not_specialize=["C", "taps", "directions", "first", "longest"])
def _heights_kernel(  # type: ignore[no-untyped-def]
    kernels, a, q, means, branches, out, N, C, taps, directions, first, longest, BL: tl.constexpr,
):  # fmt: skip
    """Store the terms of a_b in du, by the number of taps that reach an output: 0 .. longest."""
    c = tl.program_id(0).to(tl.int64)
    out += (c * directions + tl.program_id(1)) * (longest + 1)
    before = 0.0
    for start in range(0, longest + 1, BL):
        j = start + tl.arange(0, BL)
        v = tl.zeros([BL], tl.float32)
        for n in range(N):
            here = tl.load(branches + 5 * n + 2) == first + tl.program_id(1)
            size = tl.where(here, tl.load(branches + 5 * n + 1), 0)
            long = tl.load(branches + 5 * n + 3)
            height = tl.load(a + n * C + c).to(tl.float32)
            height += tl.load(q + n * C + c).to(tl.float32) * tl.load(means + long * C + c, long >= 0, 0.0)
            v += height * tl.load(kernels + c * taps + tl.load(branches + 5 * n) + j, j < size, 0.0).to(tl.float32)
        tl.store(out + j, before + tl.cumsum(v, 0) - v, j <= longest)
        before += tl.sum(v, 0)


@triton.jit(do_not_specialize=["C", "taps", "directions", "first", "longest", "width", "own_width", "short_taps"])
def _kernel_gradient_kernel(  # type: ignore[no-untyped-def]
    cross, table, own, own_table, energies, inputs, means, s, q, a, branches, out,
    C, taps, directions, first, longest, width, own_width, short_taps, BLOCK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store the gradient of one branch's taps in one channel.

    It is s times the correlation of u and g, minus q times that of u and c_b, minus a times the sums of the inputs.
    """
    c = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    size = tl.load(branches + 5 * n + 1)
    direction = tl.load(branches + 5 * n + 2)
    long = tl.load(branches + 5 * n + 3)
    sn = tl.load(s + n * C + c).to(tl.float32)
    qn = tl.load(q + n * C + c).to(tl.float32)
    an = tl.load(a + n * C + c).to(tl.float32) + qn * tl.load(means + long * C + c, long >= 0, 0.0)
    cross += c * width
    own += c * own_width
    own_table += 3 * tl.maximum(long, 0)
    energies += c * short_taps + tl.load(branches + 5 * n + 4)
    inputs += (c * directions + direction - first) * longest
    for start in range(0, size, BL):
        j = start + tl.arange(0, BL)
        inside = j < size
        lag = tl.where(direction != 0, -1 - j, j)
        energy = tl.load(energies + j, j < tl.where(long < 0, size, 0), 0.0)
        energy += correlation(own, own_table, lag, j < tl.where(long < 0, 0, size), BLOCK)
        total = sn * correlation(cross, table, lag, inside, BLOCK) - qn * energy
        total -= an * tl.load(inputs + j, inside, 0.0)
        tl.store(out + c * taps + tl.load(branches + 5 * n) + j, total, inside)


class TapSums:
    """The sums of one batch: x (C, B, time) of length L, and kernels (C, taps)."""

    def __init__(self, x: Tensor, kernels: Tensor, plan: Plan, L: int, lengths: Tensor | None) -> None:
        self.x, self.kernels, self.plan, self.L = x, kernels, plan, L
        self.C, self.B, self.time = x.shape
        self.N, self.taps = len(plan.branches), kernels.shape[1]
        self.lengths, self.masked = x if lengths is None else lengths, lengths is not None
        self.layout = self.taps, plan.directions, plan.first, plan.longest

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(*shape, dtype=torch.float32)

    def write_inputs(self, out: Tensor) -> None:
        """Write the sums over batch and time of the inputs that each tap multiplies to out (C, directions, longest)."""
        p = self.plan
        values, each = self._empty(self.C, p.directions, self.L + 1), p.directions if self.masked else 1
        _batch_sums_kernel[(self.C, each, triton.cdiv(self.L + 1, SUMS["BL"]))](
            self.x, self.lengths, values, self.B, self.L, self.time // 16, p.directions, p.first, MASKED=self.masked,
            **SUMS,
        )  # fmt: skip
        _input_sums_kernel[(self.C * p.directions,)](values, out, self.L, p.longest, BL=TAP_BLOCK)

    def write_means(self, inputs: Tensor, out: Tensor) -> None:
        """Write the means of the long branches to out (long, C)."""
        p = self.plan
        _means_kernel[(self.C, len(p.long))](
            self.kernels, inputs, self.lengths, p.branches, p.each.groups, out, self.C, self.B, self.L, *self.layout,
            MASKED=self.masked, BL=TAP_BLOCK,
        )  # fmt: skip

    def products(self, g: Tensor, cross: Tensor) -> Tensor:
        """Return partial sums over batch and time, (P, N + 2, C), of g c_b, of g and of g u.

        g is (C, B, time); `cross` are the diagonals of its correlation with x.
        """
        p, out = self.plan, self._empty(PARTS, self.N + 2, self.C)
        _products_kernel[(self.C, self.N + 1 + PARTS)](
            self.kernels, g, cross, p.cross.table, p.branches, out, self.N, self.C, self.B, self.time // 16, self.taps,
            cross.shape[1], BLOCK=SQUARE, BL=TAP_BLOCK, PARTS=PARTS,
        )  # fmt: skip
        return out

    def heights(self, a: Tensor, q: Tensor, means: Tensor) -> Tensor:
        """Return the terms of a_b in du, (C, directions, longest + 1), by the number of taps that reach an output."""
        p = self.plan
        out = self._empty(self.C, p.directions, p.longest + 1)
        _heights_kernel[(self.C, p.directions)](
            self.kernels, a, q, means, p.branches, out, self.N, self.C, *self.layout, BL=TAP_BLOCK
        )
        return out

    def gradient(
        self, cross: Tensor, outputs: Tensor, energies: Tensor, inputs: Tensor, means: Tensor, s: Tensor, q: Tensor,
        a: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the gradient of the kernels for dc_b = s_b g - a_b - q_b c_b.

        `outputs` (long, C, B, time) are the long branches' outputs minus `means`; `energies` (C, short taps) are the
        derivatives of the sums of c_b^2 / 2 of the short branches.
        """
        p, out = self.plan, self._empty(*self.kernels.shape)
        own, diagonals = (p.own, correlate(self.x, outputs, p.own)) if p.long else (p.cross, cross)
        _kernel_gradient_kernel[(self.C, self.N)](
            cross, p.cross.table, diagonals, own.table, energies, inputs, means, s, q, a, p.branches, out, self.C,
            *self.layout, cross.shape[1], diagonals.shape[1], p.short_taps, BLOCK=SQUARE, BL=TAP_BLOCK,
        )  # fmt: skip
        return out
