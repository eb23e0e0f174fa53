"""Convolution with a dense kernel as a product with its Toeplitz matrix, on the tensor cores; by Triton.

It takes O(L^2) operations where the FFT takes O(L log L), but tensor cores are so much faster that it wins up to
several thousand positions. Its reference is `fft_conv_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common import bias_gradient, empty_contiguous, reject_forward_mode, use_triton
from .._registration import eager_op
from ..fft_conv.op import fft_conv_backward
from ..masking.op import mask_sequences
from ..select import TOEPLITZ_DTYPES

LONGEST_BACKWARD = 4096
"""The most taps whose gradients are computed on the tensor cores: the backward pass gains less than the forward one."""


def toeplitz_conv(
    u: Tensor,
    kernel: Tensor,
    lead: int = 0,
    bias: Tensor | None = None,
    gelu: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute `fft_conv` on the tensor cores.

    The kernel (C, K) is rounded to u's dtype, scaled per channel so that it neither overflows nor underflows. In
    float32 every product is the sum of three products of TF32 numbers, which is about as accurate as float32. Sums,
    bias and GELU (exact) are float32. The output has u's dtype and memory format.
    """
    if u.dtype not in TOEPLITZ_DTYPES:
        raise TypeError(f"toeplitz_conv takes u in float32, bfloat16 or float16; got {u.dtype}: use fft_conv")
    if not 0 <= lead < kernel.shape[-1]:
        raise ValueError(f"lead must be from 0 to {kernel.shape[-1] - 1}, below the kernel's length; got {lead}")
    use_triton(u, "triton")
    reject_forward_mode(u, kernel, bias)
    return _toeplitz_conv(u, kernel, bias, lengths, lead, gelu)


@eager_op("toeplitz_conv")
def _toeplitz_conv(
    u: Tensor, kernel: Tensor, bias: Tensor | None, lengths: Tensor | None, lead: int, gelu: bool
) -> Tensor:
    from . import triton_kernels

    return triton_kernels.conv(u, kernel, lead, bias, gelu, lengths)


@eager_op("toeplitz_conv_backward")
def _toeplitz_conv_backward(grad: Tensor, u: Tensor, kernel: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    from . import triton_kernels

    du, dkernel = triton_kernels.gradients(grad, u, kernel, lead)
    return du, dkernel.to(kernel.dtype).contiguous()


@_toeplitz_conv.register_fake
def _(u, kernel, bias, lengths, lead, gelu):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)


@_toeplitz_conv_backward.register_fake
def _(grad, u, kernel, lead):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *empty_contiguous(kernel)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, kernel, bias, lengths, ctx.lead, ctx.gelu = inputs
    ctx.save_for_backward(u, kernel, bias, lengths)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, kernel, bias, lengths = ctx.saved_tensors
    u, grad = mask_sequences(u, lengths), mask_sequences(grad, lengths)
    if ctx.gelu:
        before = _toeplitz_conv(u, kernel, bias, None, ctx.lead, False)
        grad = torch.ops.aten.gelu_backward(grad.float(), before.float())
    if u.dtype == torch.bfloat16 and kernel.shape[1] <= LONGEST_BACKWARD:  # float16 could overflow
        du, dkernel = _toeplitz_conv_backward(grad, u, kernel, ctx.lead)
    else:
        du, dkernel = fft_conv_backward(grad, u, kernel, ctx.lead, True)
    return mask_sequences(du, lengths), dkernel, bias_gradient(grad, bias), None, None, None


_toeplitz_conv.register_autograd(_backward, setup_context=_setup)
