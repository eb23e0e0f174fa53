"""Branches whose kernels are constant, as moving sums: differences of one cumulative sum, without FFTs; by Triton.

With the cumulative sum S[t] = u[0] + ... + u[t], a branch of width W has the moving sum m[t] = S[t] - S[t - W] and the
output h m[t]; the height h is part of the factors (`normalization.py`). One pass over S gives the statistics of all
branches, a second one the output. In the backward pass, one pass gives sum_t g m_b, another one
du[t] = sum_b e_b[t] + ... + e_b[t + W_b - 1] with e_b = dm_b = s_b g - a_b - q_b m_b, as du at the end of a chunk, from
sums of e_b over whole chunks (`_starts_kernel`), and the sum of e_b[t] - e_b[t + W_b] from t to there.

S is relative to chunks (`chunked_sums_triton.py`). Where W is a multiple of the chunk, sums over a chunk expand into
sums in the table and one sum of products, sum_t P[t] P[t - W] or sum_t g[t] P[t - W]. The other branches, and the chunk
that a sequence ends in, are computed from m itself: expanded, sums of small m would cancel.

Tensors are (B, C, L) with any strides; a program computes a chunk of BC channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import compute_dtype
from .._triton import int32_constants, narrow, offsets, widen
from .chunked_sums_triton import AREA, ENERGY, TOTAL, ChunkedSums, base_step, entry, to
from .normalization import Heights

TILES = {"moments": (32, 1), "output": (32, 4), "products": (32, 1), "gradient": (32, 4)}
HALF_TILES = {"moments": (16, 1), "output": (32, 4), "products": (32, 2), "gradient": (32, 4)}
"""Channels and warps of a program, the fastest of those tried on an H200, for float32 and for half precision."""
STARTS_CHANNELS = 16  # of a program of `_starts_kernel`


@triton.jit
def _moments_kernel(  # type: ignore[no-untyped-def]
    local, table, widths, lengths, out, C, L, N,
    MASKED: tl.constexpr, CP: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a chunk's sums of m_b and of m_b^2."""
    k, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.arange(0, BL)
    t = k * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    whole = k * BL + BL <= end
    at, tile = local + (b * chunks + k) * BL * CP, j[:, None] * CP + c[None, :]
    table += b * chunks * 5 * CP
    sums = out + (b * chunks + k) * 2 * N * C
    now = tl.load(at + tile)
    area, energy = entry(table, k, AREA, c, chunks, CP), entry(table, k, ENERGY, c, chunks, CP)
    w = tl.load(widths)
    for i in range(N):
        following = tl.load(widths + tl.minimum(i + 1, N - 1))
        n, r = w // BL, w % BL
        before = tl.load(at - w.to(tl.int64) * CP + tile, (t >= w)[:, None], 0.0)
        step = base_step(table, k, k - n, c, chunks, CP)
        if whole & (r == 0):
            first = area - entry(table, k - n, AREA, c, chunks, CP)
            second = energy + entry(table, k - n, ENERGY, c, chunks, CP) - 2 * tl.sum(now * before, 0)
            second += step * (2 * first + BL * step)
            first += BL * step
        else:
            jump = step + entry(table, k - n - 1, TOTAL, c, chunks, CP)
            m = now - before + tl.where((j < r)[:, None], jump[None, :], step[None, :])
            m = tl.where((t < end)[:, None], m, 0.0)
            first, second = tl.sum(m, 0), tl.sum(m * m, 0)
        w = following
        tl.store(sums + i * C + c, first, c < C)
        tl.store(sums + (N + i) * C + c, second, c < C)


@triton.jit
def _output_kernel(  # type: ignore[no-untyped-def]
    local, table, u, widths, scale, shift, skip, y, C, L, N, u_b, u_c, u_l, y_b, y_c, y_l,
    SKIP: tl.constexpr, CP: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a chunk of sum_b (scale_b m_b + shift_b) + skip u."""
    wide = local.dtype.element_ty
    k, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.arange(0, BL)
    t = k * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    at, tile = local + (b * chunks + k) * BL * CP, j[:, None] * CP + c[None, :]
    table += b * chunks * 5 * CP
    total = tl.zeros([BL, BC], wide)
    level, slope = tl.zeros([BC], wide), tl.zeros([BC], wide)
    w = tl.load(widths)
    for i in range(N):
        following = tl.load(widths + tl.minimum(i + 1, N - 1))
        n, r = w // BL, w % BL
        before = tl.load(at - w.to(tl.int64) * CP + tile, (t >= w)[:, None], 0.0)
        f = tl.load(scale + i * C + c, c < C, 0.0)
        slope += f
        level += tl.load(shift + i * C + c, c < C, 0.0) + f * base_step(table, k, k - n, c, chunks, CP)
        total -= f[None, :] * before
        if r > 0:
            jump = f * entry(table, k - n - 1, TOTAL, c, chunks, CP)
            total += tl.where((j < r)[:, None], jump[None, :], 0.0)
        w = following
    total += slope[None, :] * tl.load(at + tile) + level[None, :]
    inside = (t < L)[:, None] & (c < C)[None, :]
    if SKIP:
        d = to(tl.load(skip + c, c < C, 0.0), wide)
        total += d[None, :] * to(tl.load(u + b * u_b + offsets(t, c, u_l, u_c), inside, 0.0), wide)
    tl.store(y + b * y_b + offsets(t, c, y_l, y_c), narrow(total, y), inside)


@triton.jit
def _products_kernel(  # type: ignore[no-untyped-def]
    local, table, u, g, widths, lengths, out, chunk_sums, C, L, N, u_b, u_c, u_l, g_b, g_c, g_l,
    MASKED: tl.constexpr, CP: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a chunk's sums of g m_b, of g and of g u, and of m_b for widths of at least BL."""
    wide = local.dtype.element_ty
    k, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.arange(0, BL)
    t = k * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cv = tl.max_contiguous(c, 4)  # as many channels per thread as in loads of `local`
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    whole = k * BL + BL <= end
    at, tile = local + (b * chunks + k) * BL * CP, j[:, None] * CP + c[None, :]
    table += b * chunks * 5 * CP
    sums = out + (b * chunks + k) * (N + 2) * C
    chunk_sums += (b * chunks + k) * N * CP
    now = tl.load(at + tile)
    inside = (t < end)[:, None] & (c < C)[None, :]
    grad = to(tl.load(g + b * g_b + offsets(t, cv, g_l, g_c), inside, 0.0), wide)
    x = to(tl.load(u + b * u_b + offsets(t, cv, u_l, u_c), inside, 0.0), wide)
    grad_sum, grad_x, grad_now = tl.sum(grad, 0), tl.sum(grad * x, 0), tl.sum(grad * now, 0)
    tl.store(sums + N * C + c, grad_sum, c < C)
    tl.store(sums + (N + 1) * C + c, grad_x, c < C)
    area = entry(table, k, AREA, c, chunks, CP)
    w = tl.load(widths)
    for i in range(N):
        following = tl.load(widths + tl.minimum(i + 1, N - 1))
        n, r = w // BL, w % BL
        before = tl.load(at - w.to(tl.int64) * CP + tile, (t >= w)[:, None], 0.0)
        step = base_step(table, k, k - n, c, chunks, CP)
        if whole & (r == 0):
            product = grad_now - tl.sum(grad * before, 0) + step * grad_sum
            tl.store(chunk_sums + i * CP + c, area - entry(table, k - n, AREA, c, chunks, CP) + BL * step)
        else:
            jump = step + entry(table, k - n - 1, TOTAL, c, chunks, CP)
            m = now - before + tl.where((j < r)[:, None], jump[None, :], step[None, :])
            product = tl.sum(grad * m, 0)
            if n > 0:
                tl.store(chunk_sums + i * CP + c, tl.sum(tl.where((t < end)[:, None], m, 0.0), 0))
        w = following
        tl.store(sums + i * C + c, product, c < C)


@triton.jit(do_not_specialize=["chunks"])
def _starts_kernel(  # type: ignore[no-untyped-def]
    sums, chunk_sums, widths, lengths, s, q, a, starts, C, L, N, chunks,
    MASKED: tl.constexpr, CP: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store, for every chunk k, the sums over b of e_b in the chunks k .. k + W_b // BL - 1, from the last k on."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    b = tl.program_id(1).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    sums += b * chunks * (N + 2) * C
    chunk_sums += b * chunks * N * CP
    carry = tl.zeros([BC], tl.float64)
    for start in range(0, chunks, BK):
        k = chunks - 1 - start - tl.arange(0, BK)
        total = tl.zeros([BK, BC], tl.float64)
        for i in range(N):
            n = tl.load(widths + i) // BL
            if n > 0:
                si = widen(tl.load(s + i * C + c, c < C, 0.0))[None, :]
                qi = widen(tl.load(q + i * C + c, c < C, 0.0))[None, :]
                ai = widen(tl.load(a + i * C + c, c < C, 0.0))[None, :]
                for later in tl.static_range(2):  # a chunk's sum enters at k and leaves at k - n
                    at = k + later * n
                    inside = ((at >= 0) & (at < chunks))[:, None] & (c < C)[None, :]
                    grad = widen(tl.load(sums + offsets(at, c, (N + 2) * C, 1) + N * C, inside, 0.0))
                    m = widen(tl.load(chunk_sums + offsets(at, c, N * CP, 1) + i * CP, inside, 0.0))
                    count = tl.minimum(tl.maximum(end - at * BL, 0), BL)[:, None].to(tl.float64)
                    total += (1 - 2 * later) * tl.where(inside, si * grad - qi * m - ai * count, 0.0)
        out = tl.cumsum(total, 0) + carry[None, :]
        tl.store(starts + b * chunks * CP + offsets(k, c, CP, 1), narrow(out, starts), (k >= 0)[:, None])
        carry += tl.sum(total, 0)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    local, table, g, widths, lengths, s, q, a, starts, skip, du, C, L, N, g_b, g_c, g_l, o_b, o_c, o_l,
    MASKED: tl.constexpr, SKIP: tl.constexpr, CP: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store du[t] = du[after the chunk] + sum of e_b[i] - e_b[i + W_b] over b and the chunk's positions i >= t."""
    wide = local.dtype.element_ty
    k, chunks = tl.program_id(0), tl.num_programs(0)
    j = tl.arange(0, BL)
    t = k * BL + j
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cv = tl.max_contiguous(c, 4)  # as many channels per thread as in loads of `local`
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    real = (c < C)[None, :]
    at, tile = local + (b * chunks + k) * BL * CP, j[:, None] * CP + c[None, :]
    table += b * chunks * 5 * CP
    g_at = g + b * g_b + k.to(tl.int64) * BL * g_l
    g_tile = offsets(j, cv, g_l, g_c)
    now = tl.load(at + tile)
    change, tail = tl.zeros([BL, BC], wide), tl.zeros([BL, BC], wide)
    level, slope = tl.zeros([BC], wide), tl.zeros([BC], wide)
    s_sum = tl.zeros([BC], wide)
    w = tl.load(widths)
    for i in range(N):
        following = tl.load(widths + tl.minimum(i + 1, N - 1))
        n, r = w // BL, w % BL
        before = tl.load(at - w.to(tl.int64) * CP + tile, (t >= w)[:, None], 0.0)
        si = tl.load(s + i * C + c, c < C, 0.0)
        qi = tl.load(q + i * C + c, c < C, 0.0)
        ai = tl.load(a + i * C + c, c < C, 0.0)
        s_sum += si
        slope -= qi
        level -= ai + qi * base_step(table, k, k - n, c, chunks, CP)
        ahead, g_ahead = at + w.to(tl.int64) * CP, g_at + w.to(tl.int64) * g_l
        change += qi[None, :] * before
        if r > 0:
            jump = qi * entry(table, k - n - 1, TOTAL, c, chunks, CP)
            change -= tl.where((j < r)[:, None], jump[None, :], 0.0)
        step = base_step(table, k + n, k, c, chunks, CP)
        if (r == 0) & ((k + n + 1) * BL <= end):
            later = to(tl.load(g_ahead + g_tile, real, 0.0), wide)
            change += qi[None, :] * tl.load(ahead + tile) - si[None, :] * later
            slope -= qi
            level += ai + qi * step
        elif (k + n) * BL < end:
            there = (t + w < end)[:, None] & real
            later = to(tl.load(g_ahead + g_tile, there, 0.0), wide)
            jump = step + entry(table, k + n, TOTAL, c, chunks, CP)
            m = tl.load(ahead + tile, there, 0.0) - now
            m += tl.where((j >= BL - r)[:, None], jump[None, :], step[None, :])
            e = tl.where(there, si[None, :] * later - ai[None, :] - qi[None, :] * m, 0.0)
            change -= e
            tail += tl.where((j >= BL - r)[:, None], e, 0.0)
        w = following
    inside = (t < L)[:, None] & real
    grad = to(tl.load(g_at + g_tile, inside, 0.0), wide)
    change += s_sum[None, :] * grad + slope[None, :] * now + level[None, :]
    change = tl.where((t < end)[:, None], change, 0.0)
    last = tl.load(starts + (b * chunks + k + 1) * CP + c, c < tl.where(k + 1 < chunks, CP, 0), 0.0) + tl.sum(tail, 0)
    total = last[None, :] + tl.cumsum(change, 0, reverse=True)
    if SKIP:
        total += to(tl.load(skip + c, c < C, 0.0), wide)[None, :] * grad
    tl.store(du + b * o_b + offsets(t, cv, o_l, o_c), narrow(total, du), inside)


class MovingSums:
    """Moving sums of u (B, C, L) over the last widths[b] positions, times heights as in `ConstantKernels`."""

    def __init__(
        self, u: Tensor, values: Tensor, lengths: Tensor | None, factors: Sequence[float], widths: Sequence[int]
    ) -> None:
        self.u, self.lengths, self.dtype = u, lengths, compute_dtype(u, values)
        self.heights = Heights(values, factors)
        self.N, self.widths = len(widths), int32_constants(widths, u)
        self.S = ChunkedSums(u, self.dtype)

    def _run(self, name: str, kernel: Any, *arguments: Any, **options: Any) -> None:
        """Run a kernel with a program for every chunk of some channels."""
        (channels, warps), S = (HALF_TILES if self.u.element_size() == 2 else TILES)[name], self.S
        grid = S.chunks, S.CP // channels, len(self.u)
        kernel[grid](S.local, S.table, *arguments, **options, CP=S.CP, BL=S.BL, BC=channels, num_warps=warps)

    def _empty(self, *shape: int) -> Tensor:
        return self.u.new_empty(*shape, dtype=self.dtype)

    def _lengths(self) -> tuple[Tensor, dict[str, Any]]:
        return self.u if self.lengths is None else self.lengths, {"MASKED": self.lengths is not None}

    def moments(self) -> tuple[Tensor, None]:
        """Return partial sums of m_b and of m_b^2, (P, 2, N, C)."""
        (B, C, L), (lengths, masked) = self.u.shape, self._lengths()
        parts = self._empty(B * self.S.chunks, 2, self.N, C)
        self._run("moments", _moments_kernel, self.widths, lengths, parts, C, L, self.N, **masked)
        return parts, None

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b m_b + shift_b) + skip u, like u."""
        (_, C, L), u = self.u.shape, self.u
        y = torch.empty_like(u)
        self._run(
            "output", _output_kernel, u, self.widths, scale, shift, u if skip is None else skip, y, C, L, self.N,
            *u.stride(), *y.stride(), SKIP=skip is not None,
        )  # fmt: skip
        return y

    def products(self, grad: Tensor) -> Tensor:
        """Return partial sums over batch and time, (P, N + 2, C), of g m_b, of g and of g u."""
        (B, C, L), u, (lengths, masked) = self.u.shape, self.u, self._lengths()
        self.g = grad
        self.sums = self._empty(B * self.S.chunks, self.N + 2, C)
        self.chunk_sums = self._empty(B * self.S.chunks, self.N, self.S.CP)
        self._run(
            "products", _products_kernel, u, grad, self.widths, lengths, self.sums, self.chunk_sums, C, L, self.N,
            *u.stride(), *grad.stride(), **masked,
        )  # fmt: skip
        return self.sums

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of u for dm_b = s_b g - a_b - q_b m_b."""
        (B, C, L), g, (lengths, masked) = self.u.shape, self.g, self._lengths()
        starts, du = self._empty(B, self.S.chunks, self.S.CP), torch.empty_like(self.u)
        _starts_kernel[self.S.CP // STARTS_CHANNELS, B](
            self.sums, self.chunk_sums, self.widths, lengths, s, q, a, starts, C, L, self.N, self.S.chunks,
            **masked, CP=self.S.CP, BK=self.S.BK, BL=self.S.BL, BC=STARTS_CHANNELS,
        )  # fmt: skip
        self._run(
            "gradient", _gradient_kernel, g, self.widths, lengths, s, q, a, starts, g if skip is None else skip, du,
            C, L, self.N, *g.stride(), *du.stride(), **masked, SKIP=skip is not None,
        )  # fmt: skip
        return du, None
