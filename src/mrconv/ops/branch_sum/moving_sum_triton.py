"""Branches whose kernels are constant, as moving sums: differences of one cumulative sum, without FFTs; by Triton.

With the cumulative sum S[t] = u[0] + ... + u[t], a branch of height h and width W has the moving sum
m[t] = S[t] - S[t - W] and the output c[t] = h m[t]. One pass over S gives the statistics of all branches, a second one
the output. In the backward pass, one pass gives sum_t g m_b, another one the gradient of S,
dS[t] = sum_b dm_b[t] - dm_b[t + W_b] with dm_b = s_b g - a_b - q_b m_b; du is the cumulative sum of dS from the end.
The heights are part of the factors that `normalization.py` computes. S is float64, so that its differences are accurate
in float32 for sequences of any length.

Tensors are (B, C, L) with any strides; a program computes a tile of (L, C).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import compute_dtype
from .._triton import int32_constants, narrow, offsets, tiles, widen
from .normalization import Heights

TILE_TIME, TILE_CHANNELS = 128, 16  # the fastest of those tried on an H200
CHUNK = 1024  # positions that one program sums in order


@triton.jit(do_not_specialize=["L", "chunks"])
def _chunk_sums_kernel(  # type: ignore[no-untyped-def]
    x, out, C, L, chunks, x_b, x_c, x_l, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr
):
    """out[b, k, c] = sum over the k-th chunk of time, counted from the end if REVERSE."""
    k = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    total = tl.zeros([BL, BC], tl.float64)
    for start in range(k * CHUNK, tl.minimum(k * CHUNK + CHUNK, L), BL):
        i = start + tl.arange(0, BL)
        t = i
        if REVERSE:
            t = L - 1 - i
        inside = (i < L)[:, None] & (c < C)[None, :]
        total += widen(tl.load(x + b * x_b + offsets(t, c, x_l, x_c), inside, 0.0))
    tl.store(out + (b * chunks + k) * C + c, tl.sum(total, 0), c < C)


@triton.jit(do_not_specialize=["L", "chunks"])
def _cumulative_sum_kernel(  # type: ignore[no-untyped-def]
    x, sums, out, g, skip, C, L, chunks, x_b, x_c, x_l, o_b, o_c, o_l, g_b, g_c, g_l,
    REVERSE: tl.constexpr, SKIP: tl.constexpr, CHUNK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the cumulative sum of one chunk, starting from the sums of all earlier chunks."""
    k = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    sums += b * chunks * C
    total = tl.zeros([BC], tl.float64)
    for earlier in range(k):
        total += tl.load(sums + earlier * C + c, c < C, 0.0)
    if SKIP:
        d = widen(tl.load(skip + c, c < C, 0.0))
    for start in range(k * CHUNK, tl.minimum(k * CHUNK + CHUNK, L), BL):
        i = start + tl.arange(0, BL)
        t = i
        if REVERSE:
            t = L - 1 - i
        inside = (i < L)[:, None] & (c < C)[None, :]
        v = widen(tl.load(x + b * x_b + offsets(t, c, x_l, x_c), inside, 0.0))
        s = tl.cumsum(v, 0) + total[None, :]
        total += tl.sum(v, 0)
        if SKIP:
            s += d[None, :] * widen(tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0))
        tl.store(out + b * o_b + offsets(t, c, o_l, o_c), narrow(s, out), inside)


@triton.jit
def _moments_kernel(  # type: ignore[no-untyped-def]
    S, widths, lengths, out, C, L, N, s_b, s_c, s_l,
    MASKED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wide = out.dtype.element_ty
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b)
    inside = (t < end)[:, None] & (c < C)[None, :]
    now = tl.load(S + b * s_b + offsets(t, c, s_l, s_c), inside, 0.0)
    sums = out + ((b * tl.num_programs(0) + tl.program_id(0)) * 2 * N) * C
    for i in range(N):
        w = tl.load(widths + i)
        before = tl.load(S + b * s_b + offsets(t - w, c, s_l, s_c), inside & (t >= w)[:, None], 0.0)
        m = (now - before).to(wide)
        tl.store(sums + i * C + c, tl.sum(m, 0), c < C)
        tl.store(sums + (N + i) * C + c, tl.sum(m * m, 0), c < C)


@triton.jit
def _output_kernel(  # type: ignore[no-untyped-def]
    S, u, widths, factors, skip, shift, y, C, L, N, s_b, s_c, s_l, u_b, u_c, u_l, y_b, y_c, y_l,
    SKIP: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    inside = (t < L)[:, None] & (c < C)[None, :]
    now = tl.load(S + b * s_b + offsets(t, c, s_l, s_c), inside, 0.0)
    total = tl.zeros([BL, BC], tl.float64)
    for i in range(N):
        total += widen(tl.load(shift + i * C + c, c < C, 0.0))[None, :]
        w = tl.load(widths + i)
        before = tl.load(S + b * s_b + offsets(t - w, c, s_l, s_c), inside & (t >= w)[:, None], 0.0)
        total += widen(tl.load(factors + i * C + c, c < C, 0.0))[None, :] * (now - before)
    if SKIP:
        d = widen(tl.load(skip + c, c < C, 0.0))
        total += d[None, :] * widen(tl.load(u + b * u_b + offsets(t, c, u_l, u_c), inside, 0.0))
    tl.store(y + b * y_b + offsets(t, c, y_l, y_c), narrow(total, y), inside)


@triton.jit
def _products_kernel(  # type: ignore[no-untyped-def]
    S, u, g, widths, out, C, L, N, s_b, s_c, s_l, u_b, u_c, u_l, g_b, g_c, g_l,
    BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wide = out.dtype.element_ty
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    inside = (t < L)[:, None] & (c < C)[None, :]
    now = tl.load(S + b * s_b + offsets(t, c, s_l, s_c), inside, 0.0)
    grad = widen(tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0)).to(wide)
    x = widen(tl.load(u + b * u_b + offsets(t, c, u_l, u_c), inside, 0.0)).to(wide)
    sums = out + ((b * tl.num_programs(0) + tl.program_id(0)) * (N + 2)) * C
    for i in range(N):
        w = tl.load(widths + i)
        before = tl.load(S + b * s_b + offsets(t - w, c, s_l, s_c), inside & (t >= w)[:, None], 0.0)
        tl.store(sums + i * C + c, tl.sum(grad * (now - before).to(wide), 0), c < C)
    tl.store(sums + N * C + c, tl.sum(grad, 0), c < C)
    tl.store(sums + (N + 1) * C + c, tl.sum(grad * x, 0), c < C)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    S, g, widths, s, q, a, lengths, out, C, L, N, s_b, s_c, s_l, g_b, g_c, g_l, o_b, o_c, o_l,
    MASKED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    wide = s.dtype.element_ty
    end = L
    if MASKED:
        end = tl.load(lengths + b)
    real = (c < C)[None, :]
    inside = (t < L)[:, None] & real
    base = S + b * s_b
    now = tl.load(base + offsets(t, c, s_l, s_c), inside, 0.0)
    grad = widen(tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0)).to(wide)
    total = tl.zeros([BL, BC], tl.float64)
    for i in range(N):  # e[t] is added at t and subtracted at t - w with the same rounding: errors cancel
        w = tl.load(widths + i)
        sn = tl.load(s + i * C + c, c < C, 0.0)[None, :]
        an = tl.load(a + i * C + c, c < C, 0.0)[None, :]
        qn = tl.load(q + i * C + c, c < C, 0.0)[None, :]
        here = inside & (t < end)[:, None]
        before = tl.load(base + offsets(t - w, c, s_l, s_c), here & (t >= w)[:, None], 0.0)
        e = sn * grad - an - qn * (now - before).to(wide)
        total += tl.where(here, e, 0.0).to(tl.float64)
        there = ((t + w) < end)[:, None] & real
        after = tl.load(base + offsets(t + w, c, s_l, s_c), there, 0.0)
        later = widen(tl.load(g + b * g_b + offsets(t + w, c, g_l, g_c), there, 0.0)).to(wide)
        e = sn * later - an - qn * (after - now).to(wide)
        total -= tl.where(there, e, 0.0).to(tl.float64)
    tl.store(out + b * o_b + offsets(t, c, o_l, o_c), total, inside)


class MovingSums:
    """Moving sums of u (B, C, L) over the last widths[b] positions, times heights as in `ConstantKernels`."""

    def __init__(
        self, u: Tensor, values: Tensor, lengths: Tensor | None, factors: Sequence[float], widths: Sequence[int]
    ) -> None:
        self.u, self.lengths, self.dtype = u, lengths, compute_dtype(u, values)
        self.heights, self.x = Heights(values, factors), u.to(self.dtype)  # half precision: layout conversions
        self.S = torch.empty_like(u, dtype=torch.float64)
        _cumulative_sum(u, self.S, u, None, False)
        self.grid, self.N, self.widths = tiles(u, TILE_TIME, TILE_CHANNELS), len(widths), int32_constants(widths, u)

    def moments(self) -> tuple[Tensor, None]:
        """Return partial sums of m_b and of m_b^2, (P, 2, N, C)."""
        (_, C, L), S, lengths = self.u.shape, self.S, self.lengths
        parts = S.new_empty(self.grid[0] * self.grid[2], 2, self.N, C, dtype=self.dtype)
        _moments_kernel[self.grid](
            S, self.widths, S if lengths is None else lengths, parts, C, L, self.N, *S.stride(),
            MASKED=lengths is not None, BL=TILE_TIME, BC=TILE_CHANNELS,
        )  # fmt: skip
        return parts, None

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b m_b + shift_b) + skip u, like u."""
        (_, C, L), S, x = self.u.shape, self.S, self.x
        y = torch.empty_like(x)
        _output_kernel[self.grid](
            S, x, self.widths, scale, x if skip is None else skip, shift, y, C, L, self.N,
            *S.stride(), *x.stride(), *y.stride(), SKIP=skip is not None, BL=TILE_TIME, BC=TILE_CHANNELS,
        )  # fmt: skip
        return y if y.dtype == self.u.dtype else torch.empty_like(self.u).copy_(y)

    def products(self, grad: Tensor) -> Tensor:
        """Return partial sums over batch and time, (P, N + 2, C), of g m_b, of g and of g u."""
        (_, C, L), S, x, N = self.u.shape, self.S, self.x, self.N
        self.g = g = grad.to(self.dtype)
        parts = S.new_empty(self.grid[0] * self.grid[2], N + 2, C, dtype=self.dtype)
        _products_kernel[self.grid](
            S, x, g, self.widths, parts, C, L, N, *S.stride(), *x.stride(), *g.stride(), BL=TILE_TIME, BC=TILE_CHANNELS
        )
        return parts

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of u for dm_b = s_b g - a_b - q_b m_b."""
        (_, C, L), S, g, lengths = self.u.shape, self.S, self.g, self.lengths
        dS = torch.empty_like(S)
        _gradient_kernel[self.grid](
            S, g, self.widths, s, q, a, S if lengths is None else lengths, dS, C, L, self.N,
            *S.stride(), *g.stride(), *dS.stride(), MASKED=lengths is not None, BL=TILE_TIME, BC=TILE_CHANNELS,
        )  # fmt: skip
        du = torch.empty_like(self.u)
        _cumulative_sum(dS, du, g, skip, True)
        return du, None


def _cumulative_sum(x: Tensor, out: Tensor, g: Tensor, skip: Tensor | None, reverse: bool) -> None:
    """Write the cumulative sum of x, from the end if `reverse`, plus skip g to out; chunks are summed first."""
    B, C, L = x.shape
    chunks = triton.cdiv(L, CHUNK)
    grid = (chunks, triton.cdiv(C, TILE_CHANNELS), B)
    sums = torch.empty(B, chunks, C, dtype=torch.float64, device=x.device)
    if chunks > 1:
        _chunk_sums_kernel[grid](
            x, sums, C, L, chunks, *x.stride(), REVERSE=reverse, CHUNK=CHUNK, BL=TILE_TIME, BC=TILE_CHANNELS
        )
    _cumulative_sum_kernel[grid](
        x, sums, out, g, g if skip is None else skip, C, L, chunks, *x.stride(), *out.stride(), *g.stride(),
        REVERSE=reverse, SKIP=skip is not None, CHUNK=CHUNK, BL=TILE_TIME, BC=TILE_CHANNELS,
    )  # fmt: skip
