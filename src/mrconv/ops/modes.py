"""Kernels from low-frequency Fourier modes, stored as real pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fft import irfft, rfft

from .fft import compute_dtype, refuse_forward_mode, twins


def synthesize(modes: Tensor, n: int) -> Tensor:
    """Inverse real FFT of length n of the lowest modes (..., M, 2), the rest zero: (..., n), scaled by 1/n."""
    refuse_forward_mode(modes)
    return _synthesize(modes, n)


def synthesize_reference(modes: Tensor, n: int) -> Tensor:
    """Compute `synthesize` as a plain sum of cosines and sines."""
    m = torch.arange(min(modes.shape[-2], n // 2 + 1), device=modes.device, dtype=modes.dtype)
    angle = 2 * torch.pi / n * m[:, None] * torch.arange(n, device=modes.device, dtype=modes.dtype)
    weight = torch.where((m == 0) | (2 * m == n), 1.0, 2.0)
    real, imaginary = (modes[..., : len(m), :] * weight[:, None] / n).unbind(-1)
    imaginary = imaginary.masked_fill((m == 0) | (2 * m == n), 0.0)
    return real @ angle.cos() - imaginary @ angle.sin()


@torch.library.custom_op("mrconv::synthesize", mutates_args=())
def _synthesize(modes: Tensor, n: int) -> Tensor:
    kept = modes[..., : n // 2 + 1, :].to(compute_dtype(modes)).contiguous()
    return irfft(torch.view_as_complex(kept), n)


@torch.library.custom_op("mrconv::synthesize_backward", mutates_args=())
def _synthesize_backward(grad: Tensor, modes: Tensor) -> Tensor:
    n = grad.shape[-1]
    spectrum = torch.view_as_real(rfft(grad)[..., : modes.shape[-2]]) * (2 / n)
    spectrum[..., 0, :] /= 2
    if n % 2 == 0 and modes.shape[-2] > n // 2:
        spectrum[..., n // 2, :] /= 2
    result = torch.zeros_like(modes, memory_format=torch.contiguous_format)
    result[..., : spectrum.shape[-2], :] = spectrum
    return result


@_synthesize.register_fake
def _(modes: Tensor, n: int) -> Tensor:
    return modes.new_empty(*modes.shape[:-2], n, dtype=compute_dtype(modes))


@_synthesize_backward.register_fake
def _(grad: Tensor, modes: Tensor) -> Tensor:
    return twins(modes)[0]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0])


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _synthesize_backward(grad, *ctx.saved_tensors), None


_synthesize.register_autograd(_backward, setup_context=_setup)
