"""Branches of a few taps each by Triton, without storing the branches' outputs.

For tap i of a branch with output c, values v and lags p, let m_i = sum_t u[t - p_i] and h_i = sum_t c[t] u[t - p_i].
Then sum_t c = sum_i v_i m_i, sum_t c^2 = sum_i v_i h_i, and dc = s g - a - q c gives the gradient of v_i:
s sum_t g[t] u[t - p_i] - a m_i - q h_i. The forward pass saves m and h.

If few differences of lags occur (dilated kernels), h_i = sum_j v_j R(p_i - p_j) with the autocorrelation R of u, summed
over all branches' differences in one pass, minus the same sum over the positions outside of the sequence, which the
first and last inputs reach. Likewise the gradient of u through c is a convolution of u with the autocorrelation of the
values, except for outputs outside. Otherwise (sparse kernels), both are computed from the branches' outputs inside.
The *rows* of a branch are the positions at which its output is computed: those outside, or those inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import triton

from .._common import compute_dtype, constants, with_format_of
from .._triton import int32_constants, sum_parts_into, tiles, wide
from ..tap_conv.correlation_triton import correlate_parts, partial_sums
from ..tap_conv.triton_kernels import convolve, is_dense
from .tap_kernels_triton import (
    combine_kernel,
    input_gradient_kernel,
    moments_kernel,
    products_kernel,
    rows_kernel,
    value_gradient_kernel,
)
from .tap_layout import Members, tap_layout

TILE_TIME, TILE_CHANNELS = 64, 64  # of a tile of du, and of rows
UNROLL = 4  # taps whose inputs a program loads at a time
WARPS, REGISTERS = 4, 128  # 4 programs of 4 warps with at most 128 registers fit on a multiprocessor
SEGMENT_PARTS = 4  # of the batch, for sums over short segments
SMALL, VALUES = 32, 16  # channels of a program that combines sums or values, and values whose gradients it computes
SCRATCH_BYTES = 256 * 2**20  # for the rows, if the batch can be sliced that finely


class TritonTapBranches:
    """Branches of taps over u (B, C, L): branch i has the next sizes[i] of the taps, values (C, T) at lags."""

    heights = None

    def __init__(
        self, u: Tensor, values: Tensor, lengths: Tensor | None, lags: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.u, self.values, self.lengths, self.dtype = u, values, lengths, compute_dtype(u, values)
        self.layout = tap_layout(tuple(lags), tuple(sizes), u.shape[2], lengths is not None)
        self.channel_tiles = triton.cdiv(u.shape[1], SMALL)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return partial sums of c_b and of c_b^2, (P, 2, N, C), and m and h, (2, T, C)."""
        u, values, layout, (B, C, L) = self.u, self.values, self.layout, self.u.shape
        N, T, BT = len(layout.sizes), len(layout.lags), layout.width
        saved = torch.empty(2, T, C, dtype=self.dtype, device=u.device)
        if not layout.outside:
            out = torch.empty(B * triton.cdiv(L, TILE_TIME), 2, N, C, dtype=self.dtype, device=u.device)
            table = values.index_select(1, constants(layout.branch_taps, values)).t().to(self.dtype).contiguous()
            self._rows(u, u, self.lengths, table, None, out)
            return out, saved
        whole, segments = layout.autocorrelations, layout.segment_correlations
        sums = torch.empty(whole.rows + segments.rows, C, dtype=torch.float64, device=u.device)
        for out, each, count in (
            (sums[: whole.rows], whole, None),
            (sums[whole.rows :], segments, SEGMENT_PARTS),
        ):
            if each.pieces:
                parts = partial_sums(u, each.rows, self.dtype, count)
                correlate_parts(u, u, each, parts, self.lengths)
                sum_parts_into(out, parts)
        out = torch.empty(BT, 2, N, C, dtype=torch.float64, device=u.device)
        moments_kernel[N * BT, self.channel_tiles](
            sums, values, *self._integers(layout.starts, layout.pair_rows, layout.mass_rows), saved,
            out, C, T, *values.stride(), BT=BT, TERMS=layout.terms, BC=SMALL,
        )  # fmt: skip
        return out, saved

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, as one convolution."""
        layout = self.layout
        table = self._combine(layout.merged, (scale,), skip, layout.union.index(0), len(layout.union))
        return convolve(self.u, table, layout.union, torch.empty_like(self.u), shift)

    def products(self, grad: Tensor) -> Tensor:
        """Return partial sums over batch and time, (P, N + 2, C), of g c_b, of g and of g u."""
        self.grad, u, values, layout, C = grad, self.u, self.values, self.layout, self.u.shape[1]
        N, T, cross = len(layout.sizes), len(layout.lags), layout.cross_correlations
        parts = partial_sums(u, cross.rows, self.dtype)
        correlate_parts(grad, u, cross, parts, self.lengths)
        self.correlation = torch.empty(T, C, dtype=self.dtype, device=u.device)
        out = torch.empty(layout.width, N + 2, C, dtype=torch.float64, device=u.device)
        products_kernel[(N + 2) * layout.width, self.channel_tiles](
            parts, values, *self._integers(layout.starts, layout.positions), self.correlation, out, C, parts.shape[0],
            parts.stride(0), cross.sum_row(0), cross.row(0, 0), *values.stride(), BT=layout.width, BC=SMALL,
        )  # fmt: skip
        return out

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the values for dc_b = s_b g - a_b - q_b c_b."""
        u, layout, C, T = self.u, self.layout, self.u.shape[1], len(self.layout.lags)
        factors, lags = (s, q, a), layout.gradient_lags
        table = self._combine(layout.gradient, factors, skip, lags.index(0), len(lags), len(layout.signed_deltas))
        du, dvalues = torch.empty_like(u), torch.empty(C, T, dtype=self.values.dtype, device=u.device)
        sums = []
        for part, scratch in self._slices():
            lengths = None if self.lengths is None else self.lengths[part]
            self._rows(u[part], self.grad[part], lengths, table, factors, scratch)
            self._input_gradient(u[part], self.grad[part], lengths, scratch, table, du[part])
            if not layout.outside:
                sums.append(partial_sums(u[part], layout.row_correlations.rows, self.dtype))
                correlate_parts(scratch.transpose(1, 2), u[part], layout.row_correlations, sums[-1], lengths)
        if layout.outside:
            value_gradient_kernel[triton.cdiv(T, VALUES), self.channel_tiles](
                self.correlation, saved, *factors, *self._integers(layout.owners), dvalues, C, T,
                WIDE=wide(self.dtype), BT=VALUES, BC=SMALL,
            )  # fmt: skip
        else:
            total = F.pad(torch.cat(sums).sum(0), (0, 0, 0, 1))  # zero for taps without effect
            dvalues.copy_(total.index_select(0, constants(layout.row_positions, total) % len(total)).t())
        return with_format_of(u, du), dvalues

    def _slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the batch, with scratch memory for their rows."""
        B, C, _ = self.u.shape
        rows, dtype = self.layout.row_starts[-1], self.u.dtype if self.u.element_size() == 2 else self.dtype
        size = max(1, min(B, SCRATCH_BYTES // max(1, rows * C * dtype.itemsize)))
        scratch = torch.empty(size, rows, C, dtype=dtype, device=self.u.device)
        for start in range(0, B, size):
            yield slice(start, start + size), scratch

    def _rows(
        self,
        u: Tensor,
        g: Tensor,
        lengths: Tensor | None,
        table: Tensor,
        factors: tuple[Tensor, Tensor, Tensor] | None,
        out: Tensor,
    ) -> None:
        """Write q_b c_b + a_b outside of the sequence, or dc_b inside, to out (B, rows, C).

        Without factors, write the sums of c_b and of c_b^2 in each tile to out (P, 2, N, C).
        """
        layout, (B, C, L), tiles = self.layout, u.shape, self.layout.row_tiles(TILE_TIME)
        if not tiles:
            return
        taps, (s, q, a) = layout.branch_taps, factors or (u, u, u)
        starts = tuple(itertools.accumulate(map(len, layout.branches), initial=0))
        rows_kernel[len(tiles), triton.cdiv(C, TILE_CHANNELS), B](
            u, g, table[len(table) - len(taps) :], *self._integers([layout.lags[j] for j in taps], starts),
            *self._integers(*zip(*tiles, strict=True)), s, q, a, u if lengths is None else lengths, out, L,
            *u.stride(), *g.stride(), out.stride(0), C=C, DENSE=is_dense(u), OUTSIDE=layout.outside,
            SUMS=factors is None, MASKED=lengths is not None, EVEN=C % TILE_CHANNELS == 0, WIDE=wide(self.dtype),
            BT=layout.width, BL=TILE_TIME, BC=TILE_CHANNELS, UNROLL=UNROLL, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip

    def _combine(
        self,
        members: Members,
        factors: tuple[Tensor, ...],
        skip: Tensor | None,
        center: int,
        merged: int,
        pairs: int = 0,
    ) -> Tensor:
        """Return the table of taps (rows, C) that `members` describes; the skip is added to row `center`."""
        values, C = self.values, self.u.shape[1]
        rows = len(members.starts) - 1
        table = torch.empty(rows, C, dtype=self.dtype, device=self.u.device)
        s, q, a = factors if len(factors) == 3 else factors * 3
        combine_kernel[rows, self.channel_tiles](
            values, s, q, a, values if skip is None else skip, *self._integers(*members), table, C, merged, pairs,
            center, *values.stride(), BACKWARD=len(factors) == 3, SKIP=skip is not None,
            MEMBERS=triton.next_power_of_2(max(1, members.largest)), WIDE=wide(self.dtype), BC=SMALL,
        )  # fmt: skip
        return table

    def _input_gradient(
        self, u: Tensor, g: Tensor, lengths: Tensor | None, rows: Tensor, table: Tensor, du: Tensor
    ) -> None:
        layout, (C, L) = self.layout, u.shape[1:]
        lags = layout.gradient_lags, layout.signed_deltas, tuple(-layout.lags[j] for j in layout.row_taps)
        sizes = [triton.next_power_of_2(max(1, len(at))) for at in lags]
        input_gradient_kernel[tiles(u, TILE_TIME, TILE_CHANNELS)](
            g, u, rows, table, *self._integers(*lags, layout.row_bases), u if lengths is None else lengths, du, L,
            *map(len, lags), *g.stride(), *u.stride(), rows.stride(0), *du.stride(), C=C, DENSE=is_dense(g, u),
            OUTSIDE=layout.outside, BEYOND=layout.outside and max(layout.union) > 0,
            BEFORE=layout.outside and min(layout.union) < 0, MASKED=lengths is not None, EVEN=C % TILE_CHANNELS == 0,
            WIDE=wide(self.dtype), TAPS=sizes[0], PAIRS=sizes[1], ROW_TAPS=sizes[2], BL=TILE_TIME, BC=TILE_CHANNELS,
            UNROLL=UNROLL, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip

    def _integers(self, *tables: Sequence[int]) -> list[Tensor]:
        return [int32_constants(table, self.u) for table in tables]
