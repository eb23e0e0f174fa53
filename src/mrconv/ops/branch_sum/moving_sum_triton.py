"""The Triton kernels behind `windows.py`. Tensors are (B, C, L) with any strides; a program does a tile of (L, C).

In each, S is the running sum over time in float64 and m_b[t] = S[t] - S[t - W_b] a branch's moving sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from ..triton_tools import narrow, offsets, on_device, summed, tiles, widen

ROWS, COLUMNS = 128, 16  # of a tile: positions, channels; the best of those tried on an H200
CHUNK = 1024  # positions that one program goes through in order


@triton.jit(do_not_specialize=["L", "chunks"])
def _chunk_sums_kernel(  # type: ignore[no-untyped-def]
    x, out, C, L, chunks, x_b, x_c, x_l, REVERSE: tl.constexpr, CHUNK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr
):
    """out[b, k, c] = sum of the k-th chunk of time, counted from the end if REVERSE."""
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
def _running_sum_kernel(  # type: ignore[no-untyped-def]
    x, sums, out, g, skip, C, L, chunks, x_b, x_c, x_l, o_b, o_c, o_l, g_b, g_c, g_l,
    REVERSE: tl.constexpr, SKIP: tl.constexpr, CHUNK: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Running sum of one chunk, from the sum of all before it."""
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
    row = out + ((b * tl.num_programs(0) + tl.program_id(0)) * 2 * N) * C
    for i in range(N):
        w = tl.load(widths + i)
        before = tl.load(S + b * s_b + offsets(t - w, c, s_l, s_c), inside & (t >= w)[:, None], 0.0)
        m = (now - before).to(wide)
        tl.store(row + i * C + c, tl.sum(m, 0), c < C)
        tl.store(row + (N + i) * C + c, tl.sum(m * m, 0), c < C)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    S, u, widths, factors, skip, bias, y, C, L, N, s_b, s_c, s_l, u_b, u_c, u_l, y_b, y_c, y_l,
    SKIP: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    inside = (t < L)[:, None] & (c < C)[None, :]
    now = tl.load(S + b * s_b + offsets(t, c, s_l, s_c), inside, 0.0)
    total = tl.zeros([BL, BC], tl.float64) + widen(tl.load(bias + c, c < C, 0.0))[None, :]
    for i in range(N):
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
    pull = widen(tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0)).to(wide)
    x = widen(tl.load(u + b * u_b + offsets(t, c, u_l, u_c), inside, 0.0)).to(wide)
    row = out + ((b * tl.num_programs(0) + tl.program_id(0)) * (N + 2)) * C
    for i in range(N):
        w = tl.load(widths + i)
        before = tl.load(S + b * s_b + offsets(t - w, c, s_l, s_c), inside & (t >= w)[:, None], 0.0)
        tl.store(row + i * C + c, tl.sum(pull * (now - before).to(wide), 0), c < C)
    tl.store(row + N * C + c, tl.sum(pull, 0), c < C)
    tl.store(row + (N + 1) * C + c, tl.sum(pull * x, 0), c < C)


@triton.jit
def _pull_kernel(  # type: ignore[no-untyped-def]
    S, g, widths, heights, s, q, a, lengths, out, C, L, N, s_b, s_c, s_l, g_b, g_c, g_l, o_b, o_c, o_l,
    MASKED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    wide = heights.dtype.element_ty
    end = L
    if MASKED:
        end = tl.load(lengths + b)
    real = (c < C)[None, :]
    inside = (t < L)[:, None] & real
    base = S + b * s_b
    now = tl.load(base + offsets(t, c, s_l, s_c), inside, 0.0)
    pull = widen(tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0)).to(wide)
    total = tl.zeros([BL, BC], tl.float64)
    for i in range(N):  # both e of one position are rounded alike, so that the running sum of these cancels them
        w = tl.load(widths + i)
        h = widen(tl.load(heights + i * C + c, c < C, 0.0))
        hs = (h * widen(tl.load(s + i * C + c, c < C, 0.0))).to(wide)
        ha = (h * widen(tl.load(a + i * C + c, c < C, 0.0))).to(wide)
        hhq = (h * h * widen(tl.load(q + i * C + c, c < C, 0.0))).to(wide)
        here = inside & (t < end)[:, None]
        before = tl.load(base + offsets(t - w, c, s_l, s_c), here & (t >= w)[:, None], 0.0)
        e = hs[None, :] * pull - ha[None, :] - hhq[None, :] * (now - before).to(wide)
        total += tl.where(here, e, 0.0).to(tl.float64)
        there = ((t + w) < end)[:, None] & real
        after = tl.load(base + offsets(t + w, c, s_l, s_c), there, 0.0)
        later = widen(tl.load(g + b * g_b + offsets(t + w, c, g_l, g_c), there, 0.0)).to(wide)
        e = hs[None, :] * later - ha[None, :] - hhq[None, :] * (after - now).to(wide)
        total -= tl.where(there, e, 0.0).to(tl.float64)
    tl.store(out + b * o_b + offsets(t, c, o_l, o_c), total, inside)


def running_sum(u: Tensor) -> Tensor:
    """S[t] = u[0] + ... + u[t], float64, in u's memory format."""
    S = torch.empty_like(u, dtype=torch.float64)
    _running_sum(u, S, u, None, False)
    return S


def running_sum_back(rise: Tensor, u: Tensor, g: Tensor, skip: Tensor | None) -> Tensor:
    """du[t] = rise[t] + ... + rise[L - 1] + skip g[t], like u."""
    du = torch.empty_like(u)
    _running_sum(rise, du, g, skip, True)
    return du


def _running_sum(x: Tensor, out: Tensor, g: Tensor, skip: Tensor | None, reverse: bool) -> None:
    """Write the running sum of x, + skip g, by chunks: their sums first, then all at once."""
    B, C, L = x.shape
    chunks = triton.cdiv(L, CHUNK)
    grid = (chunks, triton.cdiv(C, COLUMNS), B)
    sums = torch.empty(B, chunks, C, dtype=torch.float64, device=x.device)
    if chunks > 1:
        _chunk_sums_kernel[grid](x, sums, C, L, chunks, *x.stride(), REVERSE=reverse, CHUNK=CHUNK, BL=ROWS, BC=COLUMNS)
    _running_sum_kernel[grid](
        x, sums, out, g, g if skip is None else skip, C, L, chunks, *x.stride(), *out.stride(), *g.stride(),
        REVERSE=reverse, SKIP=skip is not None, CHUNK=CHUNK, BL=ROWS, BC=COLUMNS,
    )  # fmt: skip


def window_moments(S: Tensor, widths: Sequence[int], lengths: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums of m_b and of m_b^2 over batch and valid positions, (2, nb, C), float64."""
    grid, (_, C, L), N = tiles(S, ROWS, COLUMNS), S.shape, len(widths)
    parts = S.new_empty(grid[0] * grid[2], 2, N, C, dtype=dtype)
    _moments_kernel[grid](
        S, on_device(widths, S), S if lengths is None else lengths, parts, C, L, N, *S.stride(),
        MASKED=lengths is not None, BL=ROWS, BC=COLUMNS,
    )  # fmt: skip
    return summed(parts)


def window_sum(
    S: Tensor, u: Tensor, widths: Sequence[int], factors: Tensor, skip: Tensor | None, bias: Tensor
) -> Tensor:
    """y = sum_b factors_b m_b + skip u + bias, in u's dtype and memory format."""
    y = torch.empty_like(u)
    grid, (_, C, L) = tiles(S, ROWS, COLUMNS), S.shape
    _sum_kernel[grid](
        S, u, on_device(widths, S), factors.contiguous(), u if skip is None else skip, bias, y, C, L,
        len(widths), *S.stride(), *u.stride(), *y.stride(), SKIP=skip is not None, BL=ROWS, BC=COLUMNS,
    )  # fmt: skip
    return y


def window_products(
    S: Tensor, u: Tensor, g: Tensor, widths: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over batch and time of g m_b (nb, C), of g (C,) and of g u (C,)."""
    grid, (_, C, L), N = tiles(S, ROWS, COLUMNS), S.shape, len(widths)
    parts = S.new_empty(grid[0] * grid[2], N + 2, C, dtype=dtype)
    _products_kernel[grid](
        S, u, g, on_device(widths, S), parts, C, L, N, *S.stride(), *u.stride(), *g.stride(), BL=ROWS, BC=COLUMNS
    )
    total = summed(parts)
    return total[:N], total[N], total[N + 1]


def window_pull(
    S: Tensor,
    g: Tensor,
    widths: Sequence[int],
    heights: Tensor,
    s: Tensor,
    q: Tensor,
    a: Tensor,
    lengths: Tensor | None,
) -> Tensor:
    """Gradient of S, float64: what du is the running sum of, from the end."""
    rise = torch.empty_like(S)
    grid, (_, C, L) = tiles(S, ROWS, COLUMNS), S.shape
    _pull_kernel[grid](
        S, g, on_device(widths, S), heights.contiguous(), s.contiguous(), q.contiguous(), a.contiguous(),
        S if lengths is None else lengths, rise, C, L, len(widths), *S.stride(), *g.stride(), *rise.stride(),
        MASKED=lengths is not None, BL=ROWS, BC=COLUMNS,
    )  # fmt: skip
    return rise
