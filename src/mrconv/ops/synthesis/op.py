"""Kernels from low-frequency Fourier modes, stored as real pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fft import irfft, rfft

from .._common import compute_dtype, empty_contiguous, reject_forward_mode, use_triton


def synthesize(modes: Tensor, lengths: Sequence[int], scales: Sequence[float], backend: str = "auto") -> list[Tensor]:
    """Return the inverse real FFT (C, n), times a scale, of the lowest modes (N, C, M, 2) for each length n."""
    reject_forward_mode(modes)
    packed = _synthesize(modes, list(lengths), list(scales), use_triton(modes, backend))
    return list(packed.split(list(lengths), 1))


@torch.library.custom_op("mrconv::synthesize", mutates_args=())
def _synthesize(modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    if triton:
        from . import triton_kernels

        return triton_kernels.synthesize(modes.to(compute_dtype(modes)).contiguous(), lengths, scales)
    spectra = torch.view_as_complex(modes.to(compute_dtype(modes), memory_format=torch.contiguous_format, copy=True))
    spectra.imag[:, :, 0] = 0  # cuFFT would add it to the result at some lengths
    for spectrum, n in zip(spectra, lengths, strict=True):
        if n % 2 == 0 and spectrum.shape[1] > n // 2:
            spectrum.imag[:, n // 2] = 0
    branches = zip(spectra, lengths, scales, strict=True)
    return torch.cat([irfft(scale * spectrum[:, : n // 2 + 1], n) for spectrum, n, scale in branches], 1)


@torch.library.custom_op("mrconv::synthesize_backward", mutates_args=())
def _synthesize_backward(grad: Tensor, modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    if triton:
        from . import triton_kernels

        return triton_kernels.analyse(grad.contiguous(), lengths, scales, modes.shape).to(modes.dtype)
    result = torch.zeros_like(modes, dtype=compute_dtype(modes), memory_format=torch.contiguous_format)
    for g, dmodes, n, scale in zip(grad.split(lengths, 1), result, lengths, scales, strict=True):
        spectrum = torch.view_as_real(rfft(g)[:, : dmodes.shape[1]])
        dmodes[:, : spectrum.shape[1]] = spectrum * (2 * scale / n)
        dmodes[:, 0] /= 2
        if n % 2 == 0 and dmodes.shape[1] > n // 2 > 0:
            dmodes[:, n // 2] /= 2
    return result.to(modes.dtype)


@_synthesize.register_fake
def _(modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    return modes.new_empty(modes.shape[1], sum(lengths), dtype=compute_dtype(modes))


@_synthesize_backward.register_fake
def _(grad: Tensor, modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    return empty_contiguous(modes)[0]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    modes, *ctx.options = inputs
    ctx.save_for_backward(modes)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _synthesize_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


_synthesize.register_autograd(_backward, setup_context=_setup)
