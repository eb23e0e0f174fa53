"""Depthwise convolution with a few taps at given lags, and its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import (
    bias_gradient,
    compute_dtype,
    empty_contiguous,
    reject_forward_mode,
    use_triton,
    with_format_of,
)
from .._registration import eager_op
from .shifts import convolve, correlate


def tap_conv(
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    bias: Tensor | None = None,
    gelu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute y[t] = sum_j values[j] u[t - lags[j]] + bias per channel, with GELU if `gelu`; y is like u.

    u is (B, C, L), values (C, T), bias (C,). Lags may be negative (future inputs) and may exceed L; u is zero outside.
    """
    reject_forward_mode(u, values, bias)
    return _tap_conv(u, values, bias, list(lags), gelu, use_triton(u, backend))


@eager_op("tap_conv")
def _tap_conv(u: Tensor, values: Tensor, bias: Tensor | None, lags: list[int], gelu: bool, triton: bool) -> Tensor:
    return convolve(u, values.to(compute_dtype(u, values)).t().contiguous(), lags, bias, triton, gelu)


@eager_op("tap_conv_backward")
def _tap_conv_backward(grad: Tensor, u: Tensor, values: Tensor, lags: list[int], triton: bool) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(u, values)
    du = convolve(grad, values.to(dtype).t().contiguous(), [-lag for lag in lags], None, triton)
    dvalues = correlate(grad, u, lags, dtype, triton)
    return with_format_of(u, du), dvalues.t().to(values.dtype).contiguous()


@_tap_conv.register_fake
def _(u, values, bias, lags, gelu, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)


@_tap_conv_backward.register_fake
def _(grad, u, values, lags, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *empty_contiguous(values)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.lags, ctx.gelu, ctx.triton = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, values, bias = ctx.saved_tensors
    if ctx.gelu:
        grad = torch.ops.aten.gelu_backward(grad, _tap_conv(u, values, bias, ctx.lags, False, ctx.triton))
    du, dvalues = _tap_conv_backward(grad, u, values, ctx.lags, ctx.triton)
    return du, dvalues, bias_gradient(grad, bias), None, None, None


_tap_conv.register_autograd(_backward, setup_context=_setup)
