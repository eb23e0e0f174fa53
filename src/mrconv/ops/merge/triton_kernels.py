"""Triton kernels that merge weighted dense kernels into one, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import int32_constants

WIDTH = 1024  # taps per program


@triton.jit(do_not_specialize=["N", "C", "taps", "width", "ahead"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    values, scale, skip, table, out, N, C, taps, width, ahead,
    SCALED: tl.constexpr, SKIP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the sum of all kernels at some positions of one channel."""
    first, c = tl.program_id(0) * WIDTH, tl.program_id(1).to(tl.int64)
    i = first + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], out.dtype.element_ty)
    if SKIP:
        total = tl.where(i == ahead, tl.load(skip + c).to(total.dtype), total)
    for k in range(N):
        start, size = tl.load(table + 4 * k), tl.load(table + 4 * k + 1)
        at, step = tl.load(table + 4 * k + 2), tl.load(table + 4 * k + 3)
        lowest = tl.minimum(at, at + step * (size - 1))
        if (lowest < first + WIDTH) & (lowest + size > first):
            j = step * (i - at)
            v = tl.load(values + c * taps + start + j, (j >= 0) & (j < size), 0.0).to(total.dtype)
            if SCALED:
                v *= tl.load(scale + k * C + c).to(total.dtype)
            total += v
    tl.store(out + c * width + i, total, i < width)


@triton.jit(do_not_specialize=["C", "taps", "width"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad, values, scale, table, dvalues, dscale, C, taps, width, SCALED: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the gradients of the taps of one kernel and channel, and of its scale."""
    k, c = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, size = tl.load(table + 4 * k), tl.load(table + 4 * k + 1)
    at, step = tl.load(table + 4 * k + 2), tl.load(table + 4 * k + 3)
    total = tl.zeros([WIDTH], grad.dtype.element_ty)
    for first in range(0, size, WIDTH):
        j = first + tl.arange(0, WIDTH)
        g = tl.load(grad + c * width + at + step * j, j < size, 0.0)
        here = c * taps + start + j
        if SCALED:
            total += g * tl.load(values + here, j < size, 0.0).to(g.dtype)
            g *= tl.load(scale + k * C + c).to(g.dtype)
        tl.store(dvalues + here, g.to(dvalues.dtype.element_ty), j < size)
    if SCALED:
        tl.store(dscale + k * C + c, tl.sum(total, 0))


def _table(sizes: Sequence[int], positions: Sequence[int], steps: Sequence[int], like: Tensor) -> Tensor:
    rows = zip(accumulate(sizes, initial=0), sizes, positions, steps, strict=False)
    return int32_constants([number for row in rows for number in row], like)


def merge(
    values: Tensor, scale: Tensor | None, skip: Tensor | None,
    sizes: Sequence[int], positions: Sequence[int], steps: Sequence[int], ahead: int, behind: int,
) -> Tensor:  # fmt: skip
    """Return the sum (C, ahead + behind) of scaled kernels values (C, sum of sizes), and of the skip at `ahead`."""
    C, taps = values.shape
    out = values.new_empty(C, ahead + behind)
    _merge_kernel[triton.cdiv(ahead + behind, WIDTH), C](
        values, values if scale is None else scale, values if skip is None else skip,
        _table(sizes, positions, steps, values), out, len(sizes), C, taps, ahead + behind, ahead,
        SCALED=scale is not None, SKIP=skip is not None, WIDTH=WIDTH,
    )  # fmt: skip
    return out


def merge_backward(
    grad: Tensor, values: Tensor, scale: Tensor | None,
    sizes: Sequence[int], positions: Sequence[int], steps: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the values and of the scale, which is empty without a scale."""
    C, taps = values.shape
    dvalues = torch.empty_like(values)
    dscale = grad.new_empty(0) if scale is None else grad.new_empty(scale.shape)
    _backward_kernel[len(sizes), C](
        grad, values, values if scale is None else scale, _table(sizes, positions, steps, values), dvalues, dscale,
        C, taps, grad.shape[1], SCALED=scale is not None, WIDTH=WIDTH,
    )  # fmt: skip
    return dvalues, dscale
