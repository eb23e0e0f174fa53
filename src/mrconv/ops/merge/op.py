"""The weighted sum of kernels as one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import Taps, contiguous, use_triton
from .._registration import eager_op
from ..kernel_taps import add_kernels


def merge(
    kernels: Sequence[Taps],
    ahead: int,
    behind: int,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
    backend: str = "auto",
) -> Taps:
    """Return the sum of kernels, each times a scale (N, C), plus a skip (C,) at lag 0.

    It is at lags -ahead .. behind - 1 if all kernels are dense, else at the union of their lags.
    """
    values = kernels[0].values
    ranges = [lags for _, lags in kernels if isinstance(lags, range)]
    all_dense = len(ranges) == len(kernels)
    if all_dense and use_triton(values, backend):
        layout = [len(at) for at in ranges], [at.start + ahead for at in ranges], [at.step for at in ranges]
        packed = torch.cat([kernel.values.expand(-1, len(kernel.lags)) for kernel in kernels], 1)
        scale, skip = contiguous(scale, skip)
        return Taps(_merge(packed, scale, skip, *layout, ahead, behind), range(-ahead, behind))
    if scale is not None:
        kernels = [Taps(s[:, None] * values, lags) for s, (values, lags) in zip(scale, kernels, strict=True)]
    if skip is not None:
        kernels = [*kernels, Taps(skip[:, None].to(values.dtype), range(1) if all_dense else (0,))]
    return add_kernels(kernels, ahead, behind)


@eager_op("merge")
def _merge(
    values: Tensor, scale: Tensor | None, skip: Tensor | None, sizes: list[int], positions: list[int], steps: list[int],
    ahead: int, behind: int,
) -> Tensor:  # fmt: skip
    from . import triton_kernels

    return triton_kernels.merge(values, scale, skip, sizes, positions, steps, ahead, behind)


@eager_op("merge_backward")
def _merge_backward(
    grad: Tensor, values: Tensor, scale: Tensor | None, sizes: list[int], positions: list[int], steps: list[int]
) -> tuple[Tensor, Tensor]:
    from . import triton_kernels

    return triton_kernels.merge_backward(grad.contiguous(), values, scale, sizes, positions, steps)


@_merge.register_fake
def _(values, scale, skip, sizes, positions, steps, ahead, behind):  # type: ignore[no-untyped-def]
    return values.new_empty(values.shape[0], ahead + behind)


@_merge_backward.register_fake
def _(grad, values, scale, sizes, positions, steps):  # type: ignore[no-untyped-def]
    return torch.empty_like(values), grad.new_empty(0 if scale is None else scale.shape)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    values, scale, skip, *ctx.layout, ctx.ahead, _ = inputs
    ctx.dtypes = [None if x is None else x.dtype for x in (scale, skip)]
    ctx.save_for_backward(values, scale)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    dvalues, dscale = _merge_backward(grad, *ctx.saved_tensors, *ctx.layout)
    scale, skip = ctx.dtypes
    dskip = None if skip is None else grad[:, ctx.ahead].to(skip, copy=True)
    return dvalues, None if scale is None else dscale.to(scale), dskip, *([None] * 5)


_merge.register_autograd(_backward, setup_context=_setup)
