"""Kernels from low-frequency Fourier modes, stored as real pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fft import irfft, rfft

from ..backends import use_triton
from ..fft_conv.op import compute_dtype, refuse_forward_mode, twins


def synthesize(modes: Tensor, lengths: Sequence[int], scales: Sequence[float], backend: str = "auto") -> list[Tensor]:
    """Inverse real FFTs of the lowest modes (N, C, M, 2), the rest zero, times scales: (C, n) for each length n."""
    refuse_forward_mode(modes)
    packed = _synthesize(modes, list(lengths), list(scales), use_triton(modes, backend))
    return list(packed.split(list(lengths), 1))


def synthesize_reference(modes: Tensor, lengths: Sequence[int], scales: Sequence[float]) -> list[Tensor]:
    """Compute `synthesize` as plain sums of cosines and sines."""
    return [scale * _sum_of_waves(row, n) for row, n, scale in zip(modes, lengths, scales, strict=True)]


def _sum_of_waves(modes: Tensor, n: int) -> Tensor:
    m = torch.arange(min(modes.shape[-2], n // 2 + 1), device=modes.device, dtype=modes.dtype)
    angle = 2 * torch.pi / n * m[:, None] * torch.arange(n, device=modes.device, dtype=modes.dtype)
    single = (m == 0) | (2 * m == n)
    real, imaginary = (modes[..., : len(m), :] * torch.where(single, 1.0, 2.0)[:, None] / n).unbind(-1)
    return real @ angle.cos() - imaginary.masked_fill(single, 0.0) @ angle.sin()


@torch.library.custom_op("mrconv::synthesize", mutates_args=())
def _synthesize(modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    if triton:
        from . import triton_kernels as kernels

        return kernels.synthesize(modes.to(compute_dtype(modes)).contiguous(), lengths, scales)
    spectra = torch.view_as_complex(modes.to(compute_dtype(modes), memory_format=torch.contiguous_format, copy=True))
    spectra.imag[:, :, 0] = 0  # cuFFT lets it leak into the result, at some lengths
    for row, n in zip(spectra, lengths, strict=True):
        if n % 2 == 0 and row.shape[1] > n // 2:
            row.imag[:, n // 2] = 0
    rows = zip(spectra, lengths, scales, strict=True)
    return torch.cat([irfft(scale * row[:, : n // 2 + 1], n) for row, n, scale in rows], 1)


@torch.library.custom_op("mrconv::synthesize_backward", mutates_args=())
def _synthesize_backward(grad: Tensor, modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    if triton:
        from . import triton_kernels as kernels

        return kernels.analyse(grad.contiguous(), lengths, scales, modes.shape).to(modes.dtype)
    result = torch.zeros_like(modes, dtype=compute_dtype(modes), memory_format=torch.contiguous_format)
    for g, row, n, scale in zip(grad.split(lengths, 1), result, lengths, scales, strict=True):
        spectrum = torch.view_as_real(rfft(g)[:, : row.shape[1]])
        row[:, : spectrum.shape[1]] = spectrum * (2 * scale / n)
        row[:, 0] /= 2
        if n % 2 == 0 and row.shape[1] > n // 2 > 0:
            row[:, n // 2] /= 2
    return result.to(modes.dtype)


@_synthesize.register_fake
def _(modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    return modes.new_empty(modes.shape[1], sum(lengths), dtype=compute_dtype(modes))


@_synthesize_backward.register_fake
def _(grad: Tensor, modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    return twins(modes)[0]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    modes, *ctx.rest = inputs
    ctx.save_for_backward(modes)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _synthesize_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


_synthesize.register_autograd(_backward, setup_context=_setup)
