"""Triton kernels of `synthesize` and `synthesize_with_taps`: all resolutions at once, as sums of cosines and sines.

These come from a table, which is computed once for each set of lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import int32_constants, wide

TAPS, CHANNELS, MODES, WEIGHTED = 64, 32, 4, 16  # taps, channels and modes per program or step
SPLIT = 1024  # taps that a program of `analyse` sums over


@triton.jit
def _synthesize_kernel(  # type: ignore[no-untyped-def]
    modes, table, lengths, starts, values, index, weights, out, C, M, T, total,
    MIXED: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store some taps of one resolution; if MIXED, weighted and added to T weighted values at positions `index`."""
    i = tl.program_id(2)
    n, start = tl.load(lengths + i), tl.load(starts + i)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    taps = tl.zeros([BC, BT], WIDE)
    row = table + start + t
    for m in range(tl.where(tl.program_id(0) * BT < n, M, 0)):
        cos, sin = tl.load(row, t < n, 0.0), tl.load(row + total, t < n, 0.0)
        row += 2 * total
        at = modes + ((i * C + c) * M + m) * 2
        real, imaginary = tl.load(at, c < C, 0.0).to(WIDE), tl.load(at + 1, c < C, 0.0).to(WIDE)
        taps += real[:, None] * cos[None, :] + imaginary[:, None] * sin[None, :]
    if MIXED:
        taps *= tl.load(weights + i * C + c, c < C, 0.0).to(WIDE)[:, None]
        weight = tl.load(weights + (tl.num_programs(2) + i) * C + c, c < C, 0.0).to(WIDE)
        for k in range(tl.where(tl.program_id(0) * BT < n, T, 0)):
            value = weight * tl.load(values + (i * C + c) * T + k, c < C, 0.0).to(WIDE)
            taps += tl.where((t == tl.load(index + i * T + k))[None, :], value[:, None], 0.0)
    at = out + c[:, None] * total + (start + t)[None, :]
    tl.store(at, taps, (c < C)[:, None] & (t < n)[None, :])


@triton.jit
def _analyse_kernel(  # type: ignore[no-untyped-def]
    grad, table, lengths, starts, out, C, M, N, total,
    SPLIT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i, part = tl.program_id(2) % N, tl.program_id(2) // N
    n, start = tl.load(lengths + i), tl.load(starts + i)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real = tl.zeros([BC, BM, BT], grad.dtype.element_ty)
    imaginary = tl.zeros([BC, BM, BT], grad.dtype.element_ty)
    for first in range(part * SPLIT, tl.minimum(n, (part + 1) * SPLIT), BT):
        t = first + tl.arange(0, BT)
        g = tl.load(grad + c[:, None] * total + (start + t)[None, :], (c < C)[:, None] & (t < n)[None, :], 0.0)
        at = table + m.to(tl.int64)[:, None] * 2 * total + (start + t)[None, :]
        inside = (m < M)[:, None] & (t < n)[None, :]
        cos, sin = tl.load(at, inside, 0.0), tl.load(at + total, inside, 0.0)
        real += g[:, None, :] * cos[None, :, :]
        imaginary += g[:, None, :] * sin[None, :, :]
    at = out + ((tl.program_id(2) * C + c)[:, None] * M + m[None, :]) * 2
    inside = (c < C)[:, None] & (m < M)[None, :]
    tl.store(at, tl.sum(real, 2), inside)
    tl.store(at + 1, tl.sum(imaginary, 2), inside)


@triton.jit
def _weight_kernel(  # type: ignore[no-untyped-def]
    grad, dmodes, modes, taps, weights, index, starts, dtaps, dweights, C, M, T, total,
    WIDE: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Weight the modes' gradient in place; store the gradients of the scattered taps and of both weights."""
    i = tl.program_id(1)
    N = tl.num_programs(1)
    c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    k = tl.arange(0, BT)
    real = (c < C)[:, None]
    smooth = tl.load(weights + i * C + c, c < C, 0.0)[:, None]
    sparse = tl.load(weights + (N + i) * C + c, c < C, 0.0)[:, None]
    product = tl.zeros([BC, BT], WIDE)
    for start in range(0, 2 * M, BT):
        at = (i * C + c)[:, None] * (2 * M) + (start + k)[None, :]
        inside = real & (start + k < 2 * M)[None, :]
        g = tl.load(dmodes + at, inside, 0.0)
        product += g * tl.load(modes + at, inside, 0.0)
        tl.store(dmodes + at, smooth * g, inside)
    tl.store(dweights + i * C + c, tl.sum(product, 1), c < C)
    product = tl.zeros([BC, BT], WIDE)
    for start in range(0, T, BT):
        position = tl.load(starts + i) + tl.load(index + i * T + start + k, start + k < T, 0)
        inside = real & (start + k < T)[None, :]
        at = (i * C + c)[:, None] * T + (start + k)[None, :]
        g = tl.load(grad + c[:, None] * total + position[None, :], inside, 0.0)
        product += g * tl.load(taps + at, inside, 0.0)
        tl.store(dtaps + at, sparse * g, inside)
    tl.store(dweights + (N + i) * C + c, tl.sum(product, 1), c < C)


@functools.lru_cache(maxsize=64)
def _table(
    lengths: tuple[int, ...], scales: tuple[float, ...], M: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return cos and -sin of each mode at each tap, weighted as in the inverse real FFT: (M, 2, sum of lengths)."""
    with torch.inference_mode(False):
        m = torch.arange(M, device=device)[:, None]
        columns = []
        for n, scale in zip(lengths, scales, strict=True):
            angle = (m * torch.arange(n, device=device) % n).double() * (2 * math.pi / n)
            single = (m == 0) | (2 * m == n)
            weight = torch.where(single, 1.0, 2.0).double().masked_fill(2 * m > n, 0.0) * (scale / n)
            columns.append(torch.stack([weight * angle.cos(), -weight.masked_fill(single, 0.0) * angle.sin()], 1))
        return torch.cat(columns, 2).to(dtype)


def synthesize(
    modes: Tensor, lengths: Sequence[int], scales: Sequence[float], mix: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Return the kernels (C, sum of lengths) of modes (N, C, M, 2), concatenated.

    With `mix`, taps (N, C, T), index (N, T) and weights (2, N, C), they are those of `synthesize_with_taps`.
    """
    N, C, M, _ = modes.shape
    taps, index, weights = mix or (modes, modes, modes)
    out = torch.empty(C, sum(lengths), dtype=modes.dtype, device=modes.device)
    _synthesize_kernel[triton.cdiv(max(lengths), TAPS), triton.cdiv(C, CHANNELS), N](
        modes, _table(tuple(lengths), tuple(scales), M, modes.dtype, modes.device), int32_constants(lengths, modes),
        int32_constants(list(accumulate(lengths, initial=0)), modes), taps, index, weights, out, C, M, taps.shape[2],
        sum(lengths), MIXED=mix is not None, WIDE=wide(modes.dtype), BT=TAPS, BC=CHANNELS,
    )  # fmt: skip
    return out


def analyse(grad: Tensor, lengths: Sequence[int], scales: Sequence[float], shape: Sequence[int]) -> Tensor:
    """Return the gradient of the modes (N, C, M, 2) from the gradient of the kernels."""
    N, C, M, _ = shape
    parts = triton.cdiv(max(lengths), SPLIT)
    out = torch.empty(parts, *shape, dtype=grad.dtype, device=grad.device)
    _analyse_kernel[triton.cdiv(M, MODES), triton.cdiv(C, CHANNELS), N * parts](
        grad, _table(tuple(lengths), tuple(scales), M, grad.dtype, grad.device), int32_constants(lengths, grad),
        int32_constants(list(accumulate(lengths, initial=0)), grad), out, C, M, N, grad.shape[1],
        SPLIT=SPLIT, BT=TAPS, BC=CHANNELS, BM=MODES,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def weight(
    grad: Tensor, dmodes: Tensor, parameters: Sequence[Tensor], index: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the parameters modes, taps and weights.

    They follow from those of the kernels and of the unweighted modes; the latter, `dmodes`, is weighted in place.
    """
    modes, taps, weights = parameters
    (N, C, T), dtaps, dweights = taps.shape, torch.empty_like(taps), torch.empty_like(weights)
    _weight_kernel[triton.cdiv(C, WEIGHTED), N](
        grad, dmodes, modes, taps, weights, index, int32_constants(list(accumulate(lengths, initial=0)), grad),
        dtaps, dweights, C, modes.shape[2], T, grad.shape[1], WIDE=wide(modes.dtype), BC=WEIGHTED, BT=TAPS,
    )  # fmt: skip
    return dmodes, dtaps, dweights
