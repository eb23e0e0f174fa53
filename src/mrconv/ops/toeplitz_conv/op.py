"""Convolution with dense kernels as products with their Toeplitz matrices, on the tensor cores.

It does O(L^2) work where the FFT does O(L log L), on units so much faster that it wins up to some thousand positions:
with one kernel, and with normalised branches. Outputs of long branches are made twice but never written, those of short
ones not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backends import use_triton
from ..branch_sum.statistics import mean_and_variance, normalised_backward, shifted, valid_count
from ..fft_conv.op import _fft_conv_backward, bias_gradient, compute_dtype, contiguous, refuse_forward_mode
from ..registration import register_branch_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHORT = 128  # taps that a short branch has at most


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
    from . import triton_kernels as kernels

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


def toeplitz_branch_sum(
    u: Tensor,
    forward: Sequence[Tensor],
    backward: Sequence[Tensor],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `spectral_branch_sum` does, for u in bfloat16; by Triton.

    The products' factors are bfloat16, the branches' gradients among them; sums and statistics are float32 or more.
    """
    if u.dtype != torch.bfloat16:
        raise TypeError(f"toeplitz_branch_sum takes u in bfloat16, got {u.dtype}: use spectral_branch_sum")
    use_triton(u, "triton")
    kernels = [*forward, *backward]
    refuse_forward_mode(u, weight, skip, bias, *kernels)
    sizes = [k.shape[1] for k in kernels]
    skip, lengths = contiguous(skip, lengths)
    every = torch.cat(kernels, 1)
    return _toeplitz_sum(u, every, weight, skip, bias, lengths, sizes, len(forward), eps, sync)[:4]


def _derivatives_shape(kernels: Tensor, weight: Tensor, sizes: list[int], *rest: object) -> tuple[int, int, int]:
    """Return the shape of what is kept of short branches; those that are long for a short input leave room."""
    return 2, kernels.shape[0], sum(size for size in sizes if size <= SHORT)


@torch.library.custom_op("mrconv::toeplitz_branch_sum", mutates_args=())
def _toeplitz_sum(
    u: Tensor,
    kernels: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from ..branch_sum.toeplitz_triton import ToeplitzBranches

    branches = ToeplitzBranches(u, kernels, sizes, forwards, lengths)
    with torch.autocast(u.device.type, enabled=False):
        sums, derivatives = branches.moments()
    mean, var, count = mean_and_variance(sums, valid_count(u, lengths), sync)
    scale = weight * torch.rsqrt(var + eps)
    y = branches.output(u, scale.float(), skip, shifted(bias, scale, mean).float())
    derivatives = F.pad(derivatives, (0, _derivatives_shape(kernels, weight, sizes)[2] - derivatives.shape[2]))
    mean, var, count, derivatives = (z.to(compute_dtype(u, kernels)) for z in (mean, var, count, derivatives))
    return y, mean, var, count, derivatives


@torch.library.custom_op("mrconv::toeplitz_branch_sum_backward", mutates_args=())
def _toeplitz_sum_backward(
    grad: Tensor,
    u: Tensor,
    kernels: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    derivatives: Tensor,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from ..branch_sum.toeplitz_triton import ToeplitzBranches

    branches = ToeplitzBranches(u, kernels, sizes, forwards, lengths)
    g = branches.rows(grad.to(u.dtype))
    inner, g_sum, cross = branches.products(g)
    dweight, *numbers = normalised_backward(inner, g_sum, weight.float(), mean, var, count, eps, sync)
    with torch.autocast(u.device.type, enabled=False):
        du, dkernels = branches.pull(g, torch.stack(numbers).float(), cross, derivatives, skip, u)
    dweight, dskip, g_sum = (x.to(weight.dtype, copy=True) for x in (dweight, cross[:, -1], g_sum))
    return du, dkernels.to(kernels.dtype), dweight, dskip, g_sum


register_branch_sum(_toeplitz_sum, _toeplitz_sum_backward, _derivatives_shape)
