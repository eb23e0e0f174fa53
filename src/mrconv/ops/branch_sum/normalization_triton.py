"""Triton kernels of `normalization.py`: one launch forward, one backward.

A program computes some channels of a branch. Everything is computed in float64: the tensors are small, and the variance
is a difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import constants
from .._triton import add_parts, fold_parts, narrow, widen
from .normalization import BackwardFactors, BranchWeights, ForwardFactors, Heights
from .statistics import BatchStatistics

PARTS, CHANNELS = 32, 32  # that a program adds at a time
SEQUENCES = 256  # whose lengths a program adds at a time
ELEMENTS = 2048  # running statistics that a program updates at a time


@triton.jit
def _load(first, second, n, N, c, C, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return branch n of two tensors (branches, C), of which the first has N branches."""
    value = widen(tl.load(first + n * C + c, c < tl.where(n < N, C, 0), 0.0))
    if TWO:
        value += widen(tl.load(second + (n - N) * C + c, c < tl.where(n < N, 0, C), 0.0))
    return value


@triton.jit
def _store(value, first, second, n, N, c, C, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store branch n of two tensors (branches, C), of which the first has N branches."""
    tl.store(first + n * C + c, narrow(value, first), c < tl.where(n < N, C, 0))
    if TWO:
        tl.store(second + (n - N) * C + c, narrow(value, second), c < tl.where(n < N, 0, C))


@triton.jit
def _height(values, factors, n, c, C, v_n, v_c):  # type: ignore[no-untyped-def]
    at = values + tl.full([], n, tl.int64) * v_n + c.to(tl.int64) * v_c
    return widen(tl.load(at, c < C, 0.0)) * tl.load(factors + n)


@triton.jit(do_not_specialize=["P", "B", "values"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    parts, lengths, alpha, gamma, beta, alpha2, gamma2, beta2, heights, factors,
    mean, var, count, scale, shift, means, P, N, C, B, values, h_n, h_c,
    EPS: tl.constexpr, MASKED: tl.constexpr, TWO: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    HEIGHTS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    branches = tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = n * C + c
    if MASKED:
        lines = tl.zeros([BB], tl.int64)
        for start in range(0, B, BB):
            b = start + tl.arange(0, BB)
            lines += tl.load(lengths + b, b < B, 0).to(tl.int64)
        valid = tl.sum(lines, 0).to(tl.float64)
    else:
        valid = tl.full([], values, tl.int64).to(tl.float64)
    if (n == 0) & (tl.program_id(1) == 0):
        tl.store(count, narrow(valid, count))
    valid = tl.maximum(valid, 1.0)
    first = add_parts(parts, n * C, 2 * branches * C, P, c, C, BP, BC)
    second = add_parts(parts, (branches + n) * C, 2 * branches * C, P, c, C, BP, BC)
    m = first / valid
    v = tl.maximum(second / valid - m * m, 0.0)
    if HEIGHTS:
        tl.store(means + here, narrow(m, means), c < C)
        h = _height(heights, factors, n, c, C, h_n, h_c)
        m *= h
        v *= h * h
    weight = _load(alpha, alpha2, n, N, c, C, TWO)
    bias = tl.zeros([BC], tl.float64)
    if BETA:
        bias = weight * _load(beta, beta2, n, N, c, C, TWO)
    if GAMMA:
        weight *= _load(gamma, gamma2, n, N, c, C, TWO)
    weight /= tl.sqrt(v + EPS)
    tl.store(mean + here, narrow(m, mean), c < C)
    tl.store(var + here, narrow(v, var), c < C)
    tl.store(shift + here, narrow(bias - weight * m, shift), c < C)
    if HEIGHTS:
        weight *= h
    tl.store(scale + here, narrow(weight, scale), c < C)


@triton.jit(do_not_specialize=["P"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    parts, mean, var, count, alpha, gamma, beta, alpha2, gamma2, beta2, heights, factors, means,
    dalpha, dgamma, dbeta, dalpha2, dgamma2, dbeta2, dskip, dheights, out, P, N, C, h_n, h_c,
    EPS: tl.constexpr, TWO: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr,
    HEIGHTS: tl.constexpr, SIZE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    branches = tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = n * C + c
    size = (branches + 2) * C
    inner = add_parts(parts, n * C, size, P, c, C, BP, BC)
    g_sum = add_parts(parts, branches * C, size, P, c, C, BP, BC)
    if SKIP:  # noqa: SIM102 (SKIP is known when the kernel is compiled)
        if n == 0:
            g_u = add_parts(parts, (branches + 1) * C, size, P, c, C, BP, BC)
            tl.store(dskip + c, narrow(g_u, dskip), c < C)
    m = widen(tl.load(mean + here, c < C, 0.0))
    rstd = 1.0 / tl.sqrt(widen(tl.load(var + here, c < C, 1.0)) + EPS)
    valid = tl.maximum(widen(tl.load(count)), 1.0)
    product = inner
    if HEIGHTS:
        h = _height(heights, factors, n, c, C, h_n, h_c)
        product *= h
    dweight = rstd * (product - m * g_sum)
    weight = _load(alpha, alpha2, n, N, c, C, TWO)
    grad = dweight
    if GAMMA:
        _store(weight * dweight, dgamma, dgamma2, n, N, c, C, TWO)
    if BETA:
        _store(weight * g_sum, dbeta, dbeta2, n, N, c, C, TWO)
    if GAMMA:
        g = _load(gamma, gamma2, n, N, c, C, TWO)
        grad *= g
        weight *= g
    if BETA:
        grad += g_sum * _load(beta, beta2, n, N, c, C, TWO)
    _store(grad, dalpha, dalpha2, n, N, c, C, TWO)
    s = weight * rstd
    q = s * rstd * dweight / valid
    a = s * g_sum / valid - q * m
    if HEIGHTS:
        centred = inner - widen(tl.load(means + here, c < C, 0.0)) * g_sum
        dh = s * EPS * rstd * rstd * centred * tl.load(factors + n)
        at = dheights + here * SIZE
        tl.store(at, narrow(dh, dheights), c < C)
        for e in tl.static_range(1, SIZE):
            tl.store(at + e, narrow(tl.zeros([BC], tl.float64), dheights), c < C)
        s *= h
        q *= h * h
        a *= h
    tl.store(out + here, narrow(s, out), c < C)
    tl.store(out + branches * C + here, narrow(q, out), c < C)
    tl.store(out + 2 * branches * C + here, narrow(a, out), c < C)


def forward_factors(
    parts: Tensor,
    count: Tensor | int,
    weights: Sequence[BranchWeights],
    heights: Heights | None,
    eps: float,
    dtype: torch.dtype,
) -> ForwardFactors:
    """Compute `normalization.forward_factors`; `count` is the number of values, or the lengths of the sequences."""
    parts = fold_parts(parts)
    P, _, N, C = parts.shape
    lengths = count if isinstance(count, Tensor) else None
    mean, var, scale, shift = (parts.new_empty(N, C, dtype=dtype) for _ in range(4))
    valid = parts.new_empty((), dtype=dtype)
    means = None if heights is None else parts.new_empty(N, C, dtype=dtype)
    _forward_kernel[(N, triton.cdiv(C, CHANNELS))](
        parts, parts if lengths is None else lengths, *_flat(weights, parts), *_tables(heights, parts),
        mean, var, valid, scale, shift, parts if means is None else means, P, len(weights[0].alpha), C,
        1 if lengths is None else len(lengths), 1 if lengths is not None else count, *_strides(heights),
        EPS=eps, MASKED=lengths is not None, **_options(weights, heights), BP=PARTS, BC=CHANNELS, BB=SEQUENCES,
    )  # fmt: skip
    return ForwardFactors(BatchStatistics(mean, var, valid), scale, shift, means)


def backward_factors(
    parts: Tensor,
    statistics: BatchStatistics,
    weights: Sequence[BranchWeights],
    skip: Tensor | None,
    heights: Heights | None,
    means: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> BackwardFactors:
    """Compute `normalization.backward_factors`."""
    parts = fold_parts(parts)
    P, (N, C) = len(parts), statistics.mean.shape
    dweights = [
        BranchWeights(_empty_like(alpha), *(x if x is None else _empty_like(x) for x in others))
        for alpha, *others in weights
    ]
    dskip = parts.new_empty(0) if skip is None else _empty_like(skip)
    dheights = None if heights is None else _empty_like(heights.values)
    out = parts.new_empty(3, N, C, dtype=dtype)
    _backward_kernel[(N, triton.cdiv(C, CHANNELS))](
        parts, *statistics, *_flat(weights, parts), *_tables(heights, parts), means, *_flat(dweights, parts), dskip,
        parts if dheights is None else dheights, out, P, len(weights[0].alpha), C, *_strides(heights),
        EPS=eps, SKIP=skip is not None, SIZE=1 if heights is None else heights.values[0, 0].numel(),
        **_options(weights, heights), BP=PARTS, BC=CHANNELS,
    )  # fmt: skip
    s, q, a = out.unbind(0)
    return BackwardFactors(dweights, dskip, s, q, a, dheights)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _flat(weights: Sequence[BranchWeights], other: Tensor) -> list[Tensor]:
    """Return alpha, gamma and beta of two directions, contiguous; `other` for those that are missing."""
    every = [x for each in weights for x in each]
    return [other if x is None else x.contiguous() for x in (*every, None, None, None)[:6]]


def _tables(heights: Heights | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and factors of the heights; `other` if there are none."""
    return (other, other) if heights is None else (heights.values, constants(heights.factors, other, torch.float64))


def _strides(heights: Heights | None) -> tuple[int, ...]:
    return (0, 0) if heights is None else heights.values.stride()[:2]


def _options(weights: Sequence[BranchWeights], heights: Heights | None) -> dict[str, bool]:
    return {
        "TWO": len(weights) == 2, "GAMMA": weights[0].gamma is not None, "BETA": weights[0].beta is not None,
        "HEIGHTS": heights is not None,
    }  # fmt: skip


@triton.jit(do_not_specialize=["size", "total"])
def _running_kernel(  # type: ignore[no-untyped-def]
    mean, var, count, momentum, mean1, var1, batches1, mean2, var2, batches2, size, total,
    CUMULATIVE: tl.constexpr, TWO: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Update the running statistics of `size` elements and, if TWO, of the others up to `total`; one program."""
    values = widen(tl.load(count))
    batches = tl.load(batches1) + 1
    step = 1.0 / batches.to(tl.float64) if CUMULATIVE else tl.load(momentum)
    step2 = step
    if TWO:
        others = tl.load(batches2) + 1
        if CUMULATIVE:
            step2 = 1.0 / others.to(tl.float64)
    tl.debug_barrier()  # all threads have read the number of batches
    tl.store(batches1, batches)
    if TWO:
        tl.store(batches2, others)
    unbias = values / tl.maximum(values - 1.0, 1.0)
    step = tl.where(values > 0, step, 0.0)
    step2 = tl.where(values > 0, step2, 0.0)
    for start in range(0, total, BE):
        e = start + tl.arange(0, BE)
        m = widen(tl.load(mean + e, e < total, 0.0))
        v = widen(tl.load(var + e, e < total, 0.0)) * unbias
        _move(mean1, e, size, m, step)
        _move(var1, e, size, v, step)
        if TWO:
            _move(mean2, e - size, total - size, m, step2)
            _move(var2, e - size, total - size, v, step2)


@triton.jit
def _move(running, e, size, value, step):  # type: ignore[no-untyped-def]
    """Move the elements e of a running statistic, those from 0 to `size`, towards a value."""
    inside = (e >= 0) & (e < size)
    old = widen(tl.load(running + e, inside, 0.0))
    tl.store(running + e, narrow(old + step * (value - old), running), inside)


def update_running_statistics(
    mean: Tensor, var: Tensor, count: Tensor, buffers: Sequence[Tensor | None], momentum: float | None
) -> None:
    """Compute `running_statistics.update_running_statistics` for contiguous mean, var, count of two BatchNorms."""
    one, two = buffers[0], buffers[3] is not None
    assert one is not None
    _running_kernel[(1,)](
        mean, var, count, constants([momentum or 0.0], mean, torch.float64),
        *(one if x is None else x for x in buffers), one.numel(), mean.numel(),
        CUMULATIVE=momentum is None, TWO=two, BE=ELEMENTS, num_warps=16,
    )  # fmt: skip
