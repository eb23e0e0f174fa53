"""Convolution with a sum of constant kernels, as moving sums of the input, without gradients; by Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import use_triton
from .._registration import eager_op


def moving_sum_conv(
    u: Tensor,
    values: Tensor,
    factors: Sequence[float],
    widths: Sequence[int],
    skip: Tensor | None,
    bias: Tensor,
    gelu: bool = False,
) -> Tensor:
    """Compute y[t] = sum_i h_i (u[t - W_i + 1] + ... + u[t]) + skip u[t] + bias, with GELU if `gelu`; y is like u.

    u is (B, C, L), skip and bias (C,). The height h_i is factors[i] times the first of values[i, c, ...], as in
    `ConstantKernels`; widths are the W_i. Half precision is computed in float32.
    """
    use_triton(u, "triton")
    return _moving_sum_conv(u, values, list(factors), list(widths), skip, bias, gelu)


@eager_op("moving_sum_conv")
def _moving_sum_conv(
    u: Tensor,
    values: Tensor,
    factors: list[float],
    widths: list[int],
    skip: Tensor | None,
    bias: Tensor,
    gelu: bool,
) -> Tensor:
    from . import triton_kernels

    return triton_kernels.conv(u, values, factors, widths, skip, bias, gelu)


@_moving_sum_conv.register_fake
def _(u, values, factors, widths, skip, bias, gelu):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)
