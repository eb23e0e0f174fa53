"""Short branches of the Toeplitz algorithm: statistics and gradients without the branches' outputs.

The energy of a branch c = k * u is k' R k, where R[i, j] is the sum over batch and time of u[t - i] u[t - j]. R is
the input's autocorrelation at i - j minus the terms of outputs beyond an edge of the input: a cumulative sum along the
diagonals of y' y, where y are the input's values next to the edge. The gradient of the kernel is 2 R k. The gradient of
the input is its convolution with the kernels' autocorrelations minus, next to the edge, a cumulative sum along the
diagonals of k k'. Programs read and write matrices by diagonals, so that these sums run along an axis of a tile.

For causal branches the edge is the end of each sequence, y[n] = u[length - n] and y[0] = 0; for anticausal ones it is
the start, y[n] = u[n]. Terms that are added and subtracted again can be much larger than the result, so they are
float32 or float64, and as factors of products the sum of two bfloat16 numbers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import INTERPRETED
from ..toeplitz_conv.triton_kernels import COPIES
from .toeplitz_plan import SQUARE, Plan, group
from .toeplitz_taps_triton import correlation, edge_offsets

SEQUENCES, DIAGONALS, COLUMNS = 16, 32, 64  # per program or step
STRIP_BLOCK = 512  # lags that are written to a strip at a time


@triton.jit(do_not_specialize=["B", "L", "units", "first"])
def _gram_kernel(  # type: ignore[no-untyped-def]
    x, lengths, out, B, L, units, first,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Store y' y, summed over all sequences, for the edges y of one channel and direction."""
    c = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, EDGE)
    total = tl.zeros([EDGE, EDGE], tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        at, inside = edge_offsets(lengths, c, b, n, B, L, units, first + tl.program_id(1), MASKED)
        y = tl.load(x + at, inside, 0.0)
        if WIDE:
            y = y.to(tl.float32)
        total = tl.dot(tl.trans(y), y, total, input_precision=PRECISION)
    out += (c * tl.num_programs(1) + tl.program_id(1)) * EDGE * EDGE
    tl.store(out + n[:, None] * EDGE + n[None, :], total)


@triton.jit(do_not_specialize=["N", "C", "taps", "short_taps", "longest", "width", "most", "parts"])
def _moments_kernel(  # type: ignore[no-untyped-def]
    kernels, grams, diagonals, table, inputs, branches, short, energies, out,
    N, C, taps, short_taps, longest, width, most, parts, SQUARE: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store R k and the sums of c and of c^2 for one short branch of one channel and direction."""
    c = tl.program_id(0).to(tl.int64)
    n = tl.load(short + tl.program_id(1) * most + tl.program_id(2))
    here = c * tl.num_programs(1) + tl.program_id(1)
    i = tl.arange(0, EDGE)
    size = tl.load(branches + 5 * n + 1, n >= 0, 0)
    k = kernels + c * taps + tl.load(branches + 5 * n, n >= 0, 0)
    energy = tl.zeros([EDGE], tl.float64)
    if n >= 0:
        for start in range(1 - EDGE, EDGE, BE):
            e = start + tl.arange(0, BE)
            j = i[:, None] + e[None, :]
            inside = (j >= 0) & (j < EDGE)
            beyond = tl.cumsum(tl.load(grams + here * EDGE * EDGE + i[:, None] * EDGE + j, inside, 0.0), 0)
            total = correlation(diagonals + c * width, table, tl.abs(e), tl.abs(e) < EDGE, SQUARE)
            v = tl.load(k + j, inside & (j < size), 0.0).to(tl.float64)
            energy += tl.sum((total[None, :] - beyond).to(tl.float64) * v, 1)
        v = tl.load(k + i, i < size, 0.0).to(tl.float64)
        sums = tl.load(inputs + here * longest + i, i < size, 0.0).to(tl.float64)
        tl.store(energies + c * short_taps + tl.load(branches + 5 * n + 4) + i, energy.to(tl.float32), i < size)
        out += n * C + c
        tl.store(out, tl.sum(v * sums, 0))
        tl.store(out + N * C, tl.sum(v * energy, 0))
        for part in range(2, 2 * parts):
            tl.store(out + part * N * C, 0.0)


@triton.jit(do_not_specialize=["C", "taps", "most"])
def _beyond_kernel(  # type: ignore[no-untyped-def]
    kernels, q, branches, short, first_row, out, C, taps, most, EDGE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store cumulative sums from the end along the diagonals of sum_b q_b k_b k_b', as two bfloat16 numbers each.

    Also store the first row, which is the autocorrelation, as float32.
    """
    c = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, EDGE)[:, None]
    j = i + (tl.program_id(2) * BE - EDGE + tl.arange(0, BE))[None, :]
    total = tl.zeros([EDGE, BE], tl.float64)
    for m in range(most):
        n = tl.load(short + tl.program_id(1) * most + m)
        size = tl.load(branches + 5 * n + 1, n >= 0, 0)
        k = kernels + c * taps + tl.load(branches + 5 * n, n >= 0, 0)
        v = tl.load(k + i, i < size, 0.0).to(tl.float64) * tl.load(q + n * C + c, n >= 0, 0.0).to(tl.float64)
        total += v * tl.load(k + j, (j >= 0) & (j < size), 0.0).to(tl.float64)
    total = tl.cumsum(total, 0, reverse=True).to(tl.float32)
    inside = (j >= 0) & (j < EDGE)
    here = c * tl.num_programs(1) + tl.program_id(1)
    tl.store(first_row + here * EDGE + i * 0 + j, total, inside & (i == 0))
    rounded = total.to(tl.bfloat16)
    out += here * 2 * EDGE * EDGE + i * EDGE + j
    tl.store(out, rounded, inside)
    tl.store(out + EDGE * EDGE, (total - rounded.to(tl.float32)).to(tl.bfloat16), inside)


@triton.jit(do_not_specialize=["C", "directions"])
def _energy_strips_kernel(  # type: ignore[no-untyped-def]
    rows, strips, groups, C, directions, EDGE: tl.constexpr, COPIES: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Write one copy of one channel's strip of minus the kernels' autocorrelation, rounded, or of its error."""
    c = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    low, width, begin, _, _ = group(groups, tl.program_id(2))
    out = strips + (begin * C + c * width) * COPIES + r * width
    for start in range(0, width, BL):
        i = start + tl.arange(0, BL)
        lag = tl.abs(low + i - r)
        total = tl.zeros([BL], tl.float32)
        for direction in range(directions):
            total -= tl.load(rows + (c * directions + direction) * EDGE + lag, lag < EDGE, 0.0)
        rounded = total.to(tl.bfloat16)
        error = (total - rounded.to(tl.float32)).to(tl.bfloat16)
        tl.store(out + i, tl.where(tl.program_id(2) == 0, rounded, error), i < width)


@triton.jit(do_not_specialize=["B", "L", "units", "directions", "first"])
def _add_edges_kernel(  # type: ignore[no-untyped-def]
    x, lengths, matrices, out, B, L, units, directions, first,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add the edges of x times matrices, each the sum of two, to the edges of `out`."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    n = tl.arange(0, EDGE)
    for direction in range(directions):
        at, inside = edge_offsets(lengths, c, b, n, B, L, units, first + direction, MASKED)
        y = tl.load(x + at, inside, 0.0)
        if WIDE:
            y = y.to(tl.float32)
        for start in range(0, EDGE, BN):
            m = start + tl.arange(0, BN)
            total = tl.zeros([BB, BN], tl.float32)
            for half in range(2):
                matrix = ((c * directions + direction) * 2 + half) * EDGE * EDGE
                w = tl.load(matrices + matrix + n[:, None] * EDGE + m[None, :])
                if WIDE:
                    w = w.to(tl.float32)
                total = tl.dot(y, w, total, input_precision=PRECISION)
            there, exists = edge_offsets(lengths, c, b, m, B, L, units, first + direction, MASKED)
            tl.store(out + there, total + tl.load(out + there, exists, 0.0), exists)
        tl.debug_barrier()  # the edges may overlap


class ShortBranches:
    """The short branches of kernels (C, taps) over x (C, B, time) of length L."""

    def __init__(self, x: Tensor, kernels: Tensor, plan: Plan, L: int, lengths: Tensor | None) -> None:
        self.x, self.kernels, self.plan = x, kernels, plan
        self.C, self.B, time = x.shape
        self.layout = {"B": self.B, "L": L, "units": time // 16, "first": plan.first, "MASKED": lengths is not None}
        self.lengths = x if lengths is None else lengths
        self.matrices = x.new_empty(self.C, plan.directions, 2, plan.edge, plan.edge)
        self.options = {"WIDE": INTERPRETED, "PRECISION": "ieee" if INTERPRETED else "tf32", "EDGE": plan.edge}

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(*shape, dtype=torch.float32)

    def moments(self, diagonals: Tensor, inputs: Tensor, energies: Tensor, out: Tensor) -> None:
        """Write the sums of c_b and of c_b^2 to out (parts, 2, N, C), and their derivatives to energies (C, taps).

        `diagonals` are the input's autocorrelation, `inputs` (C, directions, longest) its sums at each tap. The
        derivatives are those of the sums of c_b^2 / 2 with respect to the taps.
        """
        p = self.plan
        grams = self._empty(self.C, p.directions, p.edge, p.edge)
        _gram_kernel[(self.C, p.directions)](self.x, self.lengths, grams, **self.layout, **self.options, BB=SEQUENCES)
        _moments_kernel[(self.C, p.directions, p.short.shape[1])](
            self.kernels, grams, diagonals, p.auto.table, inputs, p.branches, p.short, energies, out, out.shape[2],
            self.C, self.kernels.shape[1], p.short_taps, p.longest, diagonals.shape[1], p.short.shape[1], len(out),
            SQUARE=SQUARE, EDGE=p.edge, BE=min(p.edge, DIAGONALS),
        )  # fmt: skip

    def energy_strips(self, q: Tensor) -> Tensor:
        """Return strips of the even kernel that gives the terms of -q_b c_b in du, but for those next to the edges.

        `add_edges` adds the latter.
        """
        p, rows = self.plan, self._empty(self.C, self.plan.directions, self.plan.edge)
        out, width = self.x.new_empty(self.C * COPIES * p.energy.width), min(p.edge, DIAGONALS)
        _beyond_kernel[(self.C, p.directions, 2 * p.edge // width)](
            self.kernels, q, p.branches, p.short, rows, self.matrices, self.C, self.kernels.shape[1], p.short.shape[1],
            EDGE=p.edge, BE=width,
        )  # fmt: skip
        _energy_strips_kernel[(self.C, COPIES, 2)](
            rows, out, p.energy.groups, self.C, p.directions, EDGE=p.edge, COPIES=COPIES, BL=STRIP_BLOCK
        )
        return out

    def add_edges(self, du: Tensor) -> None:
        """Add the terms next to the edges to du (C, B, time), after `energy_strips`."""
        _add_edges_kernel[(self.C, triton.cdiv(self.B, SEQUENCES))](
            self.x, self.lengths, self.matrices, du, directions=self.plan.directions, **self.layout, **self.options,
            BB=SEQUENCES, BN=min(self.plan.edge, COLUMNS),
        )  # fmt: skip
