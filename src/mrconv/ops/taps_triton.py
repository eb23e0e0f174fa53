"""The Triton kernels behind `taps.py`. Tensors are (B, C, L) with any strides; a program does a tile of (L, C)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .triton_tools import offsets, on_device, tiles

ROWS, COLUMNS = 256, 32  # of a tile: positions, channels; the best of those tried on an H200

SPLITS = 64  # programs that share one tap's gradient at most


@triton.jit
def _conv_kernel(  # type: ignore[no-untyped-def]
    u, values, lags, gain, shift, lengths, y, C, L, T, u_b, u_c, u_l, v_c, v_t, y_b, y_c, y_l,
    AFFINE: tl.constexpr, MASKED: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    real = (c < C)[None, :]
    total = tl.zeros([BL, BC], WIDE)
    for j in range(T):
        s = t - tl.load(lags + j)
        x = tl.load(u + b * u_b + offsets(s, c, u_l, u_c), ((s >= 0) & (s < L))[:, None] & real, 0.0)
        total += x.to(WIDE) * tl.load(values + c * v_c + j * v_t, c < C, 0.0).to(WIDE)[None, :]
    if AFFINE:
        total *= tl.load(gain + c, c < C, 0.0).to(WIDE)[None, :]
        total += tl.load(shift + c, c < C, 0.0).to(WIDE)[None, :]
    end = L
    if MASKED:
        end = tl.load(lengths + b)
        total = tl.where((t < end)[:, None], total, 0.0)
    inside = (t < L)[:, None] & real
    at = y + b * y_b + offsets(t, c, y_l, y_c)
    if ADD:
        total += tl.load(at, inside, 0.0).to(WIDE)
    tl.store(at, total.to(y.dtype.element_ty), inside)


@triton.jit
def _moments_kernel(  # type: ignore[no-untyped-def]
    u, values, lags, starts, lengths, out, C, L, N, u_b, u_c, u_l, v_c, v_t,
    MASKED: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    real = (c < C)[None, :]
    end = L
    if MASKED:
        end = tl.load(lengths + b)
    row = out + ((b * tl.num_programs(0) + tl.program_id(0)) * 2 * N) * C
    for i in range(N):
        total = tl.zeros([BL, BC], WIDE)
        for j in range(tl.load(starts + i), tl.load(starts + i + 1)):
            s = t - tl.load(lags + j)
            x = tl.load(u + b * u_b + offsets(s, c, u_l, u_c), ((s >= 0) & (s < L))[:, None] & real, 0.0)
            total += x.to(WIDE) * tl.load(values + c * v_c + j * v_t, c < C, 0.0).to(WIDE)[None, :]
        total = tl.where((t < end)[:, None], total, 0.0)
        tl.store(row + i * C + c, tl.sum(total, 0), c < C)
        tl.store(row + (N + i) * C + c, tl.sum(total * total, 0), c < C)


@triton.jit
def _correlate_kernel(  # type: ignore[no-untyped-def]
    g, u, lags, out, B, C, L, T, g_b, g_c, g_l, u_b, u_c, u_l,
    WIDE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real = (c < C)[None, :]
    lag = tl.load(lags + j)
    total = tl.zeros([BL, BC], WIDE)
    blocks = tl.cdiv(L, BL)
    for k in range(tl.program_id(2), B * blocks, tl.num_programs(2)):
        b = (k // blocks).to(tl.int64)
        t = (k % blocks) * BL + tl.arange(0, BL)
        s = t - lag
        inside = ((t < L) & (s >= 0) & (s < L))[:, None] & real
        pull = tl.load(g + b * g_b + offsets(t, c, g_l, g_c), inside, 0.0).to(WIDE)
        total += pull * tl.load(u + b * u_b + offsets(s, c, u_l, u_c), inside, 0.0).to(WIDE)
    tl.store(out + (tl.program_id(2) * T + j) * C + c, tl.sum(total, 0), c < C)


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def convolve(
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    dtype: torch.dtype,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    lengths: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """y[t] = sum_j values[j] u[t - lags[j]]; then shift + gain y, cut at `lengths`, added to a tensor if given."""
    y = torch.empty_like(u, dtype=dtype) if add_to is None else add_to
    _, C, L = u.shape
    _conv_kernel[tiles(u, ROWS, COLUMNS)](
        u, values, on_device(lags, u), u if gain is None else gain.contiguous(),
        u if shift is None else shift.contiguous(), u if lengths is None else lengths, y, C, L, len(lags),
        *u.stride(), *values.stride(), *y.stride(), AFFINE=gain is not None, MASKED=lengths is not None,
        ADD=add_to is not None, WIDE=_wide(values.dtype), BL=ROWS, BC=COLUMNS,
    )  # fmt: skip
    return y


def moments(u: Tensor, values: Tensor, lags: Sequence[int], sizes: Sequence[int], lengths: Tensor | None) -> Tensor:
    """Sum and sum of squares of every branch's output, (2, N, C); no output is written."""
    grid, (_, C, L), N = tiles(u, ROWS, COLUMNS), u.shape, len(sizes)
    starts = [sum(sizes[:i]) for i in range(N + 1)]
    parts = values.new_empty(grid[0] * grid[2], 2, N, C)
    _moments_kernel[grid](
        u, values, on_device(lags, u), on_device(starts, u), u if lengths is None else lengths, parts,
        C, L, N, *u.stride(), *values.stride(), MASKED=lengths is not None, WIDE=_wide(values.dtype),
        BL=ROWS, BC=COLUMNS,
    )  # fmt: skip
    return parts.sum(0)


def correlate(g: Tensor, u: Tensor, lags: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Each tap's gradient: sum over batch and time of g[t] u[t - lag], (C, T)."""
    B, C, L = u.shape
    splits = min(SPLITS, B * triton.cdiv(L, ROWS))
    parts = torch.empty(splits, len(lags), C, dtype=dtype, device=u.device)
    if lags:
        _correlate_kernel[(len(lags), triton.cdiv(C, COLUMNS), splits)](
            g, u, on_device(lags, u), parts, B, C, L, len(lags), *g.stride(), *u.stride(), WIDE=_wide(dtype),
            BL=ROWS, BC=COLUMNS,
        )  # fmt: skip
    return parts.sum(0).t()
