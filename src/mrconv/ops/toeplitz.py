"""Convolution with one dense kernel as products with its Toeplitz matrix, on the tensor cores.

It does O(L^2) work where the FFT does O(L log L), on units so much faster that it wins up to some thousand positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import use_triton
from .fft import _fft_conv_backward, bias_gradient, refuse_forward_mode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def toeplitz_conv(u: Tensor, kernel: Tensor, lead: int = 0, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """Return what `fft_conv` does, plus bias (C,), then through the exact GELU if `gelu`; by Triton.

    u (B, C, L) is bfloat16 or float16, and so are the products' factors: the kernel (C, K) is rounded to u's dtype,
    scaled per channel so that it neither overflows nor underflows. Factors in float32 are split into TF32 numbers, of
    whose products three are added up, which loses about as little as float32. Sums, bias and GELU are float32. The
    result has u's dtype and memory format.
    """
    if u.dtype not in DTYPES:
        raise TypeError(f"toeplitz_conv takes u in float32, bfloat16 or float16, got {u.dtype}: use fft_conv")
    if not 0 <= lead < kernel.shape[-1]:
        raise ValueError(f"lead must be from 0 to {kernel.shape[-1] - 1}, below the kernel's length, got {lead}")
    use_triton(u, "triton")
    refuse_forward_mode(u, kernel, bias)
    return _toeplitz_conv(u, kernel, bias, lead, gelu)


@torch.library.custom_op("mrconv::toeplitz_conv", mutates_args=())
def _toeplitz_conv(u: Tensor, kernel: Tensor, bias: Tensor | None, lead: int, gelu: bool) -> Tensor:
    from . import toeplitz_triton as kernels

    return kernels.conv(u, kernel, lead, bias, gelu)


@_toeplitz_conv.register_fake
def _(u: Tensor, kernel: Tensor, bias: Tensor | None, lead: int, gelu: bool) -> Tensor:
    return torch.empty_like(u)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, kernel, bias, ctx.lead, ctx.gelu = inputs
    ctx.save_for_backward(u, kernel, bias)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, kernel, bias = ctx.saved_tensors
    if ctx.gelu:
        before = _toeplitz_conv(u, kernel, bias, ctx.lead, False)
        grad = torch.ops.aten.gelu_backward(grad.float(), before.float())
    du, dkernel = _fft_conv_backward(grad, u, kernel, ctx.lead, True)
    return du, dkernel, bias_gradient(grad, bias), None, None


_toeplitz_conv.register_autograd(_backward, setup_context=_setup)
