"""Triton kernels of synthesis: all resolutions of both directions at once, as sums of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import compute_dtype, constants
from .._triton import int32_constants, wide

TAPS, CHANNELS, MODES = 64, 32, 4  # per program
ANALYSED = {"BT": 128, "BC": 16, "num_warps": 8}  # taps and channels of a program of the backward pass


@triton.jit
def _mode(t, m, n, M, scale, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return cos and -sin of mode m at taps t of n, weighted as in the inverse real FFT; zero for missing modes."""
    turns = (m * t) % n
    turns = tl.where(2 * turns > n, turns - n, turns)
    angle = (turns.to(tl.float64) * (6.283185307179586 / n.to(tl.float64))).to(WIDE)
    single = (m == 0) | (2 * m == n)
    weight = tl.where((m < M) & (2 * m <= n), tl.where(single, 1.0, 2.0), 0.0) * (scale / n.to(tl.float64))
    return weight.to(WIDE) * tl.cos(angle), tl.where(single, 0.0, -weight).to(WIDE) * tl.sin(angle)


@triton.jit
def _load(first, second, at, inside, d, WIDE: tl.constexpr, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return elements of direction d's tensor."""
    direction = at * 0 + d
    value = tl.load(first + at, inside & (direction == 0), 0.0).to(WIDE)
    if TWO:
        value += tl.load(second + at, inside & (direction == 1), 0.0).to(WIDE)
    return value


@triton.jit
def _store(value, first, second, at, inside, d, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store elements of direction d's tensor."""
    direction = at * 0 + d
    tl.store(first + at, value.to(first.dtype.element_ty), inside & (direction == 0))
    if TWO:
        tl.store(second + at, value.to(second.dtype.element_ty), inside & (direction == 1))


@triton.jit
def _position(first, second, at, d, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return an element of direction d's positions."""
    position = tl.load(first + at)
    if TWO:
        position = tl.where(d == 0, position, tl.load(second + at))
    return position


@triton.jit
def _synthesize_kernel(  # type: ignore[no-untyped-def]
    modes, modes2, weights, weights2, taps, taps2, index, index2, shapes, scales, out, N, C, M, J, total,
    TWO: tl.constexpr, MIXED: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the first taps of one branch's kernel; if MIXED, weighted and with scattered taps added."""
    branch = tl.program_id(2)
    d = branch // N
    i = branch % N
    n = tl.load(shapes + 3 * branch).to(tl.int64)
    count = tl.load(shapes + 3 * branch + 1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    scale = tl.load(scales + branch)
    kernel = tl.zeros([BC, BT], WIDE)
    for m in range(tl.where(tl.program_id(0) * BT < count, M, 0)):
        cos, sin = _mode(t, m, n, M, scale, WIDE)
        at = ((i * C + c) * M + m) * 2
        real = _load(modes, modes2, at, c < C, d, WIDE, TWO)
        imaginary = _load(modes, modes2, at + 1, c < C, d, WIDE, TWO)
        kernel += real[:, None] * cos[None, :] + imaginary[:, None] * sin[None, :]
    if MIXED:
        kernel *= _load(weights, weights2, i * C + c, c < C, d, WIDE, TWO)[:, None]
        weight = _load(weights, weights2, (N + i) * C + c, c < C, d, WIDE, TWO)
        for j in range(J):
            value = weight * _load(taps, taps2, (i * C + c) * J + j, c < C, d, WIDE, TWO)
            here = t == _position(index, index2, i * J + j, d, TWO)
            kernel += tl.where(here[None, :], value[:, None], 0.0)
    at = out + c[:, None] * total + (tl.load(shapes + 3 * branch + 2) + t)[None, :]
    tl.store(at, kernel, (c < C)[:, None] & (t < count)[None, :])


@triton.jit
def _analyse_kernel(  # type: ignore[no-untyped-def]
    grad, modes, modes2, weights, weights2, taps, taps2, index, index2, shapes, scales,
    dmodes, dmodes2, dweights, dweights2, dtaps, dtaps2, N, C, M, J, total,
    TWO: tl.constexpr, MIXED: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store the gradients of one branch's parameters; if MIXED, a program computes all modes of its channels."""
    branch = tl.program_id(2)
    d = branch // N
    i = branch % N
    n = tl.load(shapes + 3 * branch).to(tl.int64)
    count = tl.load(shapes + 3 * branch + 1).to(tl.int64)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    grad += tl.load(shapes + 3 * branch + 2)
    scale = tl.load(scales + branch)
    if MIXED:
        factor = _load(weights, weights2, i * C + c, c < C, d, WIDE, TWO)
        product = tl.zeros([BC], WIDE)
    for first in range(tl.program_id(0) * BM, M, tl.num_programs(0) * BM):
        m = first + tl.arange(0, BM)
        real = tl.zeros([BC, BM, BT], WIDE)
        imaginary = tl.zeros([BC, BM, BT], WIDE)
        for start in range(0, count, BT):
            t = start + tl.arange(0, BT)
            g = tl.load(grad + c[:, None] * total + t[None, :], (c < C)[:, None] & (t < count)[None, :], 0.0)
            cos, sin = _mode(t[None, :], m[:, None].to(tl.int64), n, M, scale, WIDE)
            real += g[:, None, :] * cos[None, :, :]
            imaginary += g[:, None, :] * sin[None, :, :]
        at = ((i * C + c)[:, None] * M + m[None, :]) * 2
        inside = (c < C)[:, None] & (m < M)[None, :]
        dreal = tl.sum(real, 2)
        dimaginary = tl.sum(imaginary, 2)
        if MIXED:
            product += tl.sum(dreal * _load(modes, modes2, at, inside, d, WIDE, TWO), 1)
            product += tl.sum(dimaginary * _load(modes, modes2, at + 1, inside, d, WIDE, TWO), 1)
            dreal *= factor[:, None]
            dimaginary *= factor[:, None]
        _store(dreal, dmodes, dmodes2, at, inside, d, TWO)
        _store(dimaginary, dmodes, dmodes2, at + 1, inside, d, TWO)
    if MIXED:
        _store(product, dweights, dweights2, i * C + c, c < C, d, TWO)
        product = tl.zeros([BC], WIDE)
        weight = _load(weights, weights2, (N + i) * C + c, c < C, d, WIDE, TWO)
        for j in range(J):
            t = _position(index, index2, i * J + j, d, TWO)
            g = tl.load(grad + c * total + t, c < tl.where(t < count, C, 0), 0.0)
            at = (i * C + c) * J + j
            product += g * _load(taps, taps2, at, c < C, d, WIDE, TWO)
            _store(g * weight, dtaps, dtaps2, at, c < C, d, TWO)
        _store(product, dweights, dweights2, (N + i) * C + c, c < C, d, TWO)


def _tables(lengths: Sequence[int], counts: Sequence[int], scales: Sequence[float], like: Tensor) -> tuple[Tensor, ...]:
    """Return length, number of taps and start of every branch, and the scales."""
    starts = accumulate(counts, initial=0)
    shapes = [number for branch in zip(lengths, counts, starts, strict=False) for number in branch]
    return int32_constants(shapes, like), constants(scales, like, torch.float64)


def _or_first(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return contiguous tensors; the first one in place of those that are missing."""
    first = tensors[0]
    assert first is not None
    return [(first if x is None else x).contiguous() for x in tensors]


def _sizes(tensors: Sequence[Tensor | None], counts: Sequence[int]) -> tuple[int, ...]:
    """Return N, C, M, the number of scattered taps and the total number of taps."""
    modes, taps = tensors[0], tensors[4]
    assert modes is not None
    return *modes.shape[:3], 1 if taps is None else taps.shape[2], sum(counts)


def synthesize(
    tensors: Sequence[Tensor | None], lengths: Sequence[int], counts: Sequence[int], scales: Sequence[float]
) -> Tensor:
    """Compute `synthesize_packed`; tensors are modes, weights, taps and index, each of two directions."""
    modes = tensors[0]
    assert modes is not None
    N, C, M, J, total = _sizes(tensors, counts)
    out = torch.empty(C, total, dtype=compute_dtype(modes), device=modes.device)
    _synthesize_kernel[triton.cdiv(max(counts), TAPS), triton.cdiv(C, CHANNELS), len(counts)](
        *_or_first(tensors), *_tables(lengths, counts, scales, modes), out, N, C, M, J, total,
        TWO=tensors[1] is not None, MIXED=tensors[2] is not None, WIDE=wide(out.dtype), BT=TAPS, BC=CHANNELS,
    )  # fmt: skip
    return out


def analyse(
    grad: Tensor,
    tensors: Sequence[Tensor | None],
    lengths: Sequence[int],
    counts: Sequence[int],
    scales: Sequence[float],
) -> list[Tensor | None]:
    """Return the gradients of modes, weights and taps of two directions from the gradient of the kernels."""
    modes, mixed = tensors[0], tensors[2] is not None
    assert modes is not None
    N, C, M, J, total = _sizes(tensors, counts)
    gradients = [x if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:6]]
    together = min(MODES, triton.next_power_of_2(M))
    _analyse_kernel[1 if mixed else triton.cdiv(M, together), triton.cdiv(C, ANALYSED["BC"]), len(counts)](
        grad.contiguous(), *_or_first(tensors), *_tables(lengths, counts, scales, modes), *_or_first(gradients),
        N, C, M, J, total, TWO=tensors[1] is not None, MIXED=mixed, WIDE=wide(compute_dtype(modes)),
        BM=together, **ANALYSED,
    )  # fmt: skip
    return gradients
