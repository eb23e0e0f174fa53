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
from ..toeplitz_conv.correlation_triton import SQUARE, correlation
from ..toeplitz_conv.triton_kernels import COPIES
from .toeplitz_plan import Plan, group
from .toeplitz_taps_triton import edge_offsets

SEQUENCES, DIAGONALS, COLUMNS = 16, 32, 64  # per program or step
STRIP_BLOCK = 512  # lags that are written to a strip at a time


@triton.jit(do_not_specialize=["B", "L", "units", "first", "width"])
def _pair_sums_kernel(  # type: ignore[no-untyped-def]
    x, lengths, diagonals, table, out, B, L, units, first, width,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr, EDGE: tl.constexpr,
    BB: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store R of one channel and direction: the autocorrelation, minus cumulative sums along the diagonals of y' y."""
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
    tl.debug_barrier()
    for start in range(-EDGE, EDGE, BE):
        e = start + tl.arange(0, BE)
        j = n[:, None] + e[None, :]
        here = out + n[:, None] * EDGE + j
        exists = (j >= 0) & (j < EDGE)
        everywhere = correlation(diagonals + c * width, table, tl.abs(e), tl.abs(e) < EDGE, SQUARE)
        tl.store(here, everywhere[None, :] - tl.cumsum(tl.load(here, exists, 0.0), 0), exists)


@triton.jit(do_not_specialize=["N", "C", "taps", "short_taps", "longest", "most", "parts"])
def _moments_kernel(  # type: ignore[no-untyped-def]
    kernels, R, inputs, branches, short, energies, out, N, C, taps, short_taps, longest, most, parts,
    EDGE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store R k and the sums of c and of c^2 for one short branch of one channel and direction."""
    c = tl.program_id(0).to(tl.int64)
    n = tl.load(short + tl.program_id(1) * most + tl.program_id(2))
    if n >= 0:
        here = c * tl.num_programs(1) + tl.program_id(1)
        i = tl.arange(0, EDGE)
        size = tl.load(branches + 5 * n + 1)
        k = kernels + c * taps + tl.load(branches + 5 * n)
        total = tl.zeros([EDGE, BE], tl.float32)
        for start in range(0, size, BE):
            j = start + tl.arange(0, BE)
            v = tl.load(k + j, j < size, 0.0).to(tl.float32)
            total += v[None, :] * tl.load(R + here * EDGE * EDGE + i[:, None] * EDGE + j[None, :])
        energy = tl.sum(total, 1)
        tl.store(energies + c * short_taps + tl.load(branches + 5 * n + 4) + i, energy, i < size)
        v = tl.load(k + i, i < size, 0.0).to(tl.float64)
        sums = tl.load(inputs + here * longest + i, i < size, 0.0).to(tl.float64)
        out += n * C + c
        tl.store(out, tl.sum(v * sums, 0))
        tl.store(out + N * C, tl.sum(v * energy.to(tl.float64), 0))
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
    total = tl.zeros([EDGE, BE], tl.float32)
    for m in range(most):
        n = tl.load(short + tl.program_id(1) * most + m)
        size = tl.load(branches + 5 * n + 1, n >= 0, 0)
        k = kernels + c * taps + tl.load(branches + 5 * n, n >= 0, 0)
        v = tl.load(k + i, i < size, 0.0).to(tl.float32) * tl.load(q + n * C + c, n >= 0, 0.0).to(tl.float32)
        total += v * tl.load(k + j, (j >= 0) & (j < size), 0.0).to(tl.float32)
    total = tl.cumsum(total, 0, reverse=True)
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


@triton.jit(do_not_specialize=["B", "L", "units", "first"])
def _edges_kernel(  # type: ignore[no-untyped-def]
    x, lengths, matrices, out, B, L, units, first,
    MASKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Store the edges of x in one direction times a matrix, which is the sum of two."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.program_id(2) * BB + tl.arange(0, BB)
    n = tl.arange(0, EDGE)
    at, inside = edge_offsets(lengths, c, b, n, B, L, units, first + tl.program_id(1), MASKED)
    y = tl.load(x + at, inside, 0.0)
    if WIDE:
        y = y.to(tl.float32)
    here = c * tl.num_programs(1) + tl.program_id(1)
    for start in range(0, EDGE, BN):
        m = start + tl.arange(0, BN)
        total = tl.zeros([BB, BN], tl.float32)
        for half in range(2):
            w = tl.load(matrices + (here * 2 + half) * EDGE * EDGE + n[:, None] * EDGE + m[None, :])
            if WIDE:
                w = w.to(tl.float32)
            total = tl.dot(y, w, total, input_precision=PRECISION)
        tl.store(out + (here * B + b)[:, None] * EDGE + m[None, :], total, (b < B)[:, None])


class ShortBranches:
    """The short branches of kernels (C, taps) over x (C, B, time) of length L."""

    def __init__(self, x: Tensor, kernels: Tensor, plan: Plan, L: int, lengths: Tensor | None) -> None:
        self.x, self.kernels, self.plan = x, kernels, plan
        self.C, self.B, time = x.shape
        self.padded_batch = triton.next_power_of_2(max(1, self.B))
        self.layout = {"B": self.B, "L": L, "units": time // 16, "first": plan.first, "MASKED": lengths is not None}
        self.lengths = x if lengths is None else lengths
        self.options = {"WIDE": INTERPRETED, "PRECISION": "ieee" if INTERPRETED else "tf32", "EDGE": plan.edge}

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(*shape, dtype=torch.float32)

    def moments(self, diagonals: Tensor, inputs: Tensor, energies: Tensor, out: Tensor) -> None:
        """Write the sums of c_b and of c_b^2 to out (parts, 2, N, C), and their derivatives to energies (C, taps).

        `diagonals` are the input's autocorrelation, `inputs` (C, directions, longest) its sums at each tap. The
        derivatives are those of the sums of c_b^2 / 2 with respect to the taps.
        """
        p = self.plan
        R = self._empty(self.C, p.directions, p.edge, p.edge)
        _pair_sums_kernel[(self.C, p.directions)](
            self.x, self.lengths, diagonals, p.auto.table, R, width=diagonals.shape[1], SQUARE=SQUARE, BB=SEQUENCES,
            BE=min(p.edge, DIAGONALS), **self.layout, **self.options,
        )  # fmt: skip
        _moments_kernel[(self.C, p.directions, p.short.shape[1])](
            self.kernels, R, inputs, p.branches, p.short, energies, out, out.shape[2], self.C, self.kernels.shape[1],
            p.short_taps, p.longest, p.short.shape[1], len(out), EDGE=p.edge, BE=min(p.edge, DIAGONALS),
        )  # fmt: skip

    def input_gradient(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms of -q_b c_b in du: strips of an even kernel, to apply to x, and corrections at the edges.

        The corrections (C, directions, B, edge) are to be added to the gradients of the values next to the edges.
        """
        p, rows = self.plan, self._empty(self.C, self.plan.directions, self.plan.edge)
        matrices = self.x.new_empty(self.C, p.directions, 2, p.edge, p.edge)
        strips, width = self.x.new_empty(self.C * COPIES * p.energy.width), min(p.edge, DIAGONALS)
        _beyond_kernel[(self.C, p.directions, 2 * p.edge // width)](
            self.kernels, q, p.branches, p.short, rows, matrices, self.C, self.kernels.shape[1], p.short.shape[1],
            EDGE=p.edge, BE=width,
        )  # fmt: skip
        _energy_strips_kernel[(self.C, COPIES, 2)](
            rows, strips, p.energy.groups, self.C, p.directions, EDGE=p.edge, COPIES=COPIES, BL=STRIP_BLOCK
        )
        edges, sequences = self._empty(self.C, p.directions, self.B, p.edge), min(64, max(16, self.padded_batch))
        _edges_kernel[(self.C, p.directions, triton.cdiv(self.B, sequences))](
            self.x, self.lengths, matrices, edges, **self.layout, **self.options, BB=sequences,
            BN=min(p.edge, COLUMNS),
        )  # fmt: skip
        return strips, edges
