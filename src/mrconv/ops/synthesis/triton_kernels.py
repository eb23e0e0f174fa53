"""Triton kernels of `synthesize`: all resolutions at once, as sums of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import constants
from .._triton import int32_constants, wide

TAPS, CHANNELS, MODES = 64, 32, 4  # per program


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
    modes, lengths, starts, scales, out, C, M, total, WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
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


def synthesize(modes: Tensor, lengths: Sequence[int], scales: Sequence[float]) -> Tensor:
    """Return the kernels (C, sum of lengths) of modes (N, C, M, 2), concatenated."""
    N, C, M, _ = modes.shape
    out = torch.empty(C, sum(lengths), dtype=modes.dtype, device=modes.device)
    _synthesize_kernel[triton.cdiv(max(lengths), TAPS), triton.cdiv(C, CHANNELS), N](
        modes, int32_constants(lengths, modes), int32_constants(list(accumulate(lengths, initial=0)), modes),
        constants(scales, modes, torch.float64), out, C, M, sum(lengths), WIDE=wide(modes.dtype), BT=TAPS, BC=CHANNELS,
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
