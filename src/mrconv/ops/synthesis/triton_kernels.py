"""Triton kernels of `synthesize` and `synthesize_with_taps`: all resolutions at once, as sums of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import constants
from .._triton import int32_constants, wide

TAPS, CHANNELS, MODES, WEIGHTED = 64, 32, 4, 16  # taps, channels and modes per program or step


@triton.jit
def _mode(t, m, n, M, scale, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return cos and -sin of mode m at taps t of n, weighted as in the inverse real FFT; zero for missing modes."""
    turns = (m * t) % n
    turns = tl.where(2 * turns > n, turns - n, turns)
    angle = (turns.to(tl.float64) / n.to(tl.float64) * 6.283185307179586).to(WIDE)
    single = (m == 0) | (2 * m == n)
    weight = tl.where((m < M) & (2 * m <= n), tl.where(single, 1.0, 2.0), 0.0) * (scale / n.to(tl.float64))
    return weight.to(WIDE) * tl.cos(angle), tl.where(single, 0.0, -weight).to(WIDE) * tl.sin(angle)


@triton.jit
def _synthesize_kernel(  # type: ignore[no-untyped-def]
    modes, lengths, starts, scales, values, index, weights, out, C, M, T, total,
    MIXED: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store some taps of one resolution; if MIXED, weighted and added to T weighted values at positions `index`."""
    i = tl.program_id(2)
    n = tl.load(lengths + i).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    scale = tl.load(scales + i)
    taps = tl.zeros([BC, BT], WIDE)
    for m in range(tl.where(tl.program_id(0) * BT < n, M, 0)):
        cos, sin = _mode(t, m, n, M, scale, WIDE)
        at = modes + ((i * C + c) * M + m) * 2
        real, imaginary = tl.load(at, c < C, 0.0).to(WIDE), tl.load(at + 1, c < C, 0.0).to(WIDE)
        taps += real[:, None] * cos[None, :] + imaginary[:, None] * sin[None, :]
    if MIXED:
        taps *= tl.load(weights + i * C + c, c < C, 0.0).to(WIDE)[:, None]
        weight = tl.load(weights + (tl.num_programs(2) + i) * C + c, c < C, 0.0).to(WIDE)
        for k in range(tl.where(tl.program_id(0) * BT < n, T, 0)):
            value = weight * tl.load(values + (i * C + c) * T + k, c < C, 0.0).to(WIDE)
            taps += tl.where((t == tl.load(index + i * T + k))[None, :], value[:, None], 0.0)
    at = out + c[:, None] * total + (tl.load(starts + i) + t)[None, :]
    tl.store(at, taps, (c < C)[:, None] & (t < n)[None, :])


@triton.jit
def _analyse_kernel(  # type: ignore[no-untyped-def]
    grad, lengths, starts, scales, out, C, M, total,
    WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(2)
    n = tl.load(lengths + i).to(tl.int64)
    start, scale = tl.load(starts + i), tl.load(scales + i)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = tl.zeros([BC, BM, BT], WIDE)
    imaginary = tl.zeros([BC, BM, BT], WIDE)
    for first in range(0, n, BT):
        t = first + tl.arange(0, BT)
        g = tl.load(grad + c[:, None] * total + (start + t)[None, :], (c < C)[:, None] & (t < n)[None, :], 0.0)
        cos, sin = _mode(t[None, :], m[:, None], n, M, scale, WIDE)
        real += g[:, None, :] * cos[None, :, :]
        imaginary += g[:, None, :] * sin[None, :, :]
    at = out + ((i * C + c)[:, None] * M + m[None, :]) * 2
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
        modes, int32_constants(lengths, modes), int32_constants(list(accumulate(lengths, initial=0)), modes),
        constants(scales, modes, torch.float64), taps, index, weights, out, C, M, taps.shape[2], sum(lengths),
        MIXED=mix is not None, WIDE=wide(modes.dtype), BT=TAPS, BC=CHANNELS,
    )  # fmt: skip
    return out


def analyse(grad: Tensor, lengths: Sequence[int], scales: Sequence[float], shape: Sequence[int]) -> Tensor:
    """Return the gradient of the modes (N, C, M, 2) from the gradient of the kernels."""
    N, C, M, _ = shape
    out = torch.empty(*shape, dtype=grad.dtype, device=grad.device)
    _analyse_kernel[triton.cdiv(M, MODES), triton.cdiv(C, CHANNELS), N](
        grad, int32_constants(lengths, grad), int32_constants(list(accumulate(lengths, initial=0)), grad),
        constants(scales, grad, torch.float64), out, C, M, grad.shape[1],
        WIDE=wide(grad.dtype), BT=TAPS, BC=CHANNELS, BM=MODES,
    )  # fmt: skip
    return out


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
