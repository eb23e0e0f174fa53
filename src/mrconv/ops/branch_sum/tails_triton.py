"""The energies of short branches past the edge of the input, and their gradients, from matrices of the kernels' size.

In each direction's time the tail of a branch is its output past the last input. With v[j] the j-th input before the
edge and k the taps from `delay` on, where delay is 1 for causal branches and 0 for anticausal ones, whose tap 0 acts on
u[t + 1], the tail's energy is k' D k. D[i, j] is the cumulative sum along a diagonal of v[i] v[j], summed over
sequences. The gradient of the taps is 2 D k. That of v is 2 v M, where M is the cumulative sum of k k' along diagonals,
from the end. D and M do not depend on the batch, and one D serves all branches.

The inputs next to the edges are pairs of sequences, in the layout of `edge_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import cached_on_device

BLOCK, CHUNK, WARPS = 64, 32, 4  # of a product: sides of a tile, the length that it sums over, warps
DIAGONALS = 32  # per program of one warp, which walks along them


@triton.jit
def _edge(edges, c, b, j, B, C, m, groups, anticausal):  # type: ignore[no-untyped-def]
    """Load the j-th inputs before the edge of sequences b."""
    row = ((anticausal % groups * tl.cdiv(B, 2) + b // 2).to(tl.int64) * C + c) * 2 * m + b % 2
    t = tl.where(anticausal != 0, (m - j) % m, m - 1 - j)
    return tl.load(edges + row[:, None] + 2 * t[None, :], (b < B)[:, None] & (j < m // 2)[None, :], 0.0)


@triton.jit(do_not_specialize=["B", "C", "groups", "first"])
def _gram_kernel(  # type: ignore[no-untyped-def]
    edges, tiles, out, B, C, m, groups, first,
    N: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store a tile of v' v, and its mirror image, for one channel and direction."""
    i = tl.load(tiles + 2 * tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    j = tl.load(tiles + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    c, direction = tl.program_id(1).to(tl.int64), tl.program_id(2)
    total = tl.zeros([BLOCK, BLOCK], edges.dtype.element_ty)
    for start in range(0, B, CHUNK):
        b = start + tl.arange(0, CHUNK)
        v = _edge(edges, c, b, i, B, C, m, groups, first + direction)
        w = _edge(edges, c, b, j, B, C, m, groups, first + direction)
        total = tl.dot(tl.trans(v), w, total, input_precision="ieee")
    out += (c * tl.num_programs(2) + direction) * N * N
    tl.store(out + i[:, None] * N + j[None, :], total)
    tl.store(out + j[:, None] * N + i[None, :], tl.trans(total))


@triton.jit(do_not_specialize=["C", "taps", "columns"])
def _apply_kernel(  # type: ignore[no-untyped-def]
    gram, kernels, table, ranges, out, C, taps, columns, N: tl.constexpr, BE: tl.constexpr
):
    """Store the contribution of some diagonals of D to D k, for the branches of one channel and direction."""
    c, direction = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.program_id(0) * BE - N
    nearest = tl.minimum(tl.abs(first), tl.abs(first + BE - 1))
    e = first + tl.arange(0, BE)[None, :]
    gram += (c * tl.num_programs(2) + direction) * N * N
    out += (tl.program_id(0) * C + c) * columns
    carry = tl.zeros([BE], gram.dtype.element_ty)
    for start in range(0, N, BE):
        i = start + tl.arange(0, BE)
        j = i[:, None] + e
        products = tl.load(gram + i[:, None] * N + j, (j >= 0) & (j < N), 0.0)
        D = tl.cumsum(products, 0) + carry[None, :]
        carry += tl.sum(products, 0)
        for b in range(tl.load(ranges + 2 * direction), tl.load(ranges + 2 * direction + 1)):
            size = tl.load(table + 4 * b + 1)
            if (nearest < size) & (start < size):
                kernel = kernels + c * taps + tl.load(table + 4 * b)
                v = tl.sum(D * tl.load(kernel + j, (j >= 0) & (j < size), 0.0), 1)
                tl.store(out + tl.load(table + 4 * b + 2) + i, v, i < size)


@triton.jit(do_not_specialize=["C", "taps", "columns"])
def _collect_kernel(  # type: ignore[no-untyped-def]
    parts, kernels, table, energy, out, C, taps, columns, N: tl.constexpr, BE: tl.constexpr, WIDTH: tl.constexpr
):
    """Store D k of one branch and channel at its taps, and minus its energy k' D k."""
    c, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, size, column = tl.load(table + 4 * b), tl.load(table + 4 * b + 1), tl.load(table + 4 * b + 2)
    total = tl.zeros([WIDTH], parts.dtype.element_ty)
    for first in range(0, size, WIDTH):
        i = first + tl.arange(0, WIDTH)
        v = tl.zeros([WIDTH], parts.dtype.element_ty)
        for block in range(2 * N // BE):
            nearest = tl.minimum(tl.abs(block * BE - N), tl.abs(block * BE - N + BE - 1))
            if nearest < size:
                v += tl.load(parts + (block * C + c) * columns + column + i, i < size, 0.0)
        at = c * taps + start + i
        tl.store(out + at, v, i < size)
        total += v * tl.load(kernels + at, i < size, 0.0)
    tl.store(energy + tl.load(table + 4 * b + 3) * C + c, -tl.sum(total, 0))


@triton.jit(do_not_specialize=["C", "taps"])
def _matrix_kernel(  # type: ignore[no-untyped-def]
    kernels, q, table, ranges, out, C, taps, N: tl.constexpr, BE: tl.constexpr
):
    """Store some diagonals of M, the sum over branches weighted by q, for one channel and direction."""
    c, direction = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.program_id(0) * BE - N
    nearest = tl.minimum(tl.abs(first), tl.abs(first + BE - 1))
    e = first + tl.arange(0, BE)[None, :]
    out += (c * tl.num_programs(2) + direction) * N * N
    carry = tl.zeros([BE], kernels.dtype.element_ty)
    for start in range(N - BE, -1, -BE):
        i = start + tl.arange(0, BE)
        j = i[:, None] + e
        products = tl.zeros([BE, BE], kernels.dtype.element_ty)
        for b in range(tl.load(ranges + 2 * direction), tl.load(ranges + 2 * direction + 1)):
            size = tl.load(table + 4 * b + 1)
            if (nearest < size) & (start < size):
                kernel = kernels + c * taps + tl.load(table + 4 * b)
                v = tl.load(q + tl.load(table + 4 * b + 3) * C + c) * tl.load(kernel + i, i < size, 0.0)
                products += v[:, None] * tl.load(kernel + j, (j >= 0) & (j < size), 0.0)
        tl.store(out + i[:, None] * N + j, tl.cumsum(products, 0, reverse=True) + carry[None, :], (j >= 0) & (j < N))
        carry += tl.sum(products, 0)


@triton.jit(do_not_specialize=["B", "C", "groups", "first"])
def _input_gradient_kernel(  # type: ignore[no-untyped-def]
    edges, matrices, out, B, C, m, groups, first,
    N: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store a tile of v M for one channel and direction."""
    c, direction = tl.program_id(1).to(tl.int64), tl.program_id(2)
    blocks: tl.constexpr = N // BLOCK
    b = tl.program_id(0) // blocks * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    matrices += (c * tl.num_programs(2) + direction) * N * N
    total = tl.zeros([BLOCK, BLOCK], edges.dtype.element_ty)
    for start in range(0, N, CHUNK):
        i = start + tl.arange(0, CHUNK)
        v = _edge(edges, c, b, i, B, C, m, groups, first + direction)
        total = tl.dot(v, tl.load(matrices + i[:, None] * N + j[None, :]), total, input_precision="ieee")
    at = ((direction * B + b).to(tl.int64) * C + c)[:, None] * N + j[None, :]
    tl.store(out + at, total, (b < B)[:, None])


@dataclass(frozen=True)
class TailPlan:
    """Constants of the short branches, on a device."""

    N: int  # the most taps, padded
    first: int  # 0 if there are causal branches, else 1
    columns: int  # taps of all branches together
    table: Tensor  # (branches, 4): first tap from `delay` on, number of such taps, column, branch
    ranges: Tensor  # (directions, 2): first and last branch
    tiles: Tensor  # (tiles, 2): the tiles of a symmetric matrix


@cached_on_device(maxsize=1024)
def tail_plan(
    short: tuple[int, ...], sizes: tuple[int, ...], starts: tuple[int, ...], causal: int, device: torch.device
) -> TailPlan:
    """Return the plan for the short branches among branches of these sizes, the first `causal` of them causal."""
    table, column = [], 0
    for k in short:
        delay = int(k < causal)
        taps = max(0, sizes[k] - delay)
        table.append((starts[k] + delay, taps, column, k))
        column += taps
    middle = sum(k < causal for k in short)
    ranges = [(begin, end) for begin, end in ((0, middle), (middle, len(short))) if begin < end]
    N = max(BLOCK, triton.next_power_of_2(max(row[1] for row in table)))
    tiles = [(i, j) for i in range(N // BLOCK) for j in range(i, N // BLOCK)]
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (table, ranges, tiles)]
    return TailPlan(N, int(middle == 0), max(1, column), *tables)


class Tails:
    """Tails of short branches: pairs of inputs next to the edges (groups, R, C, m), kernels (C, taps) contiguous."""

    def __init__(self, edges: Tensor, kernels: Tensor, B: int, plan: TailPlan) -> None:
        self.edges, self.kernels, self.plan = torch.view_as_real(edges), kernels, plan
        groups, _, self.C, m = edges.shape
        self.shape = B, self.C, m, groups, plan.first
        self.directions = len(plan.ranges)
        self.grid = 2 * plan.N // DIAGONALS, self.C, self.directions

    def write_derivatives(self, energy: Tensor, out: Tensor) -> None:
        """Write minus the energies to (N, C), and half of their derivatives by the taps to (C, taps)."""
        plan, (C, taps) = self.plan, self.kernels.shape
        gram = self.kernels.new_empty(C, self.directions, plan.N, plan.N)
        _gram_kernel[len(plan.tiles), C, self.directions](
            self.edges, plan.tiles, gram, *self.shape,
            N=plan.N, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
        parts = self.kernels.new_empty(self.grid[0], C, plan.columns)
        _apply_kernel[self.grid](
            gram, self.kernels, plan.table, plan.ranges, parts, C, taps, plan.columns,
            N=plan.N, BE=DIAGONALS, num_warps=1,
        )  # fmt: skip
        _collect_kernel[C, len(plan.table)](
            parts, self.kernels, plan.table, energy, out, C, taps, plan.columns,
            N=plan.N, BE=DIAGONALS, WIDTH=min(128, plan.N), num_warps=1,
        )  # fmt: skip

    def input_gradient(self, q: Tensor) -> Tensor:
        """Return the gradient of sum_b q_b / 2 energy_b by the inputs before the edges, (directions, B, C, N)."""
        plan, (C, taps), (B, *_) = self.plan, self.kernels.shape, self.shape
        matrices = self.kernels.new_empty(C, self.directions, plan.N, plan.N)
        _matrix_kernel[self.grid](
            self.kernels, q, plan.table, plan.ranges, matrices, C, taps, N=plan.N, BE=DIAGONALS, num_warps=1
        )
        out = self.kernels.new_empty(self.directions, B, C, plan.N)
        _input_gradient_kernel[triton.cdiv(B, BLOCK) * (plan.N // BLOCK), C, self.directions](
            self.edges, matrices, out, *self.shape,
            N=plan.N, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
        return out
