"""Kernels from low-frequency Fourier modes, stored as real pairs, and optionally from scattered taps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.fft import irfft, rfft

from .._common import compute_dtype, constants, empty_contiguous, reject_forward_mode, use_triton


def synthesize(modes: Tensor, lengths: Sequence[int], scales: Sequence[float], backend: str = "auto") -> list[Tensor]:
    """Return the inverse real FFT (C, n), times a scale, of the lowest modes (N, C, M, 2) for each length n."""
    reject_forward_mode(modes)
    packed = _synthesize(modes, list(lengths), list(scales), use_triton(modes, backend))
    return list(packed.split(list(lengths), 1))


def synthesize_with_taps(
    modes: Tensor,
    taps: Tensor,
    index: Tensor,
    weights: Tensor,
    lengths: Sequence[int],
    scales: Sequence[float],
    backend: str = "auto",
) -> list[Tensor]:
    """Return weights[0] times the kernels of `synthesize` plus weights[1] times scattered taps.

    weights are (2, N, C); taps (N, C, T) are at distinct positions index (N, T).
    """
    reject_forward_mode(modes, taps, weights)
    triton = use_triton(modes, backend)
    packed = _synthesize_with_taps(modes, taps, weights, index, list(lengths), list(scales), triton)
    return list(packed.split(list(lengths), 1))


@torch.library.custom_op("mrconv::synthesize", mutates_args=())
def _synthesize(modes: Tensor, lengths: list[int], scales: list[float], triton: bool) -> Tensor:
    if triton:
        from . import triton_kernels

        return triton_kernels.synthesize(modes.to(compute_dtype(modes)).contiguous(), lengths, scales)
    return _by_fft(modes, lengths, scales)


def _by_fft(modes: Tensor, lengths: Sequence[int], scales: Sequence[float]) -> Tensor:
    """Return the kernels (C, sum of lengths), concatenated."""
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
    return _by_fft_backward(grad, modes, lengths, scales).to(modes.dtype)


def _by_fft_backward(grad: Tensor, modes: Tensor, lengths: Sequence[int], scales: Sequence[float]) -> Tensor:
    """Return the gradient of the modes, in float32 or float64."""
    result = torch.zeros_like(modes, dtype=compute_dtype(modes), memory_format=torch.contiguous_format)
    for g, dmodes, n, scale in zip(grad.split(list(lengths), 1), result, lengths, scales, strict=True):
        spectrum = torch.view_as_real(rfft(g)[:, : dmodes.shape[1]])
        dmodes[:, : spectrum.shape[1]] = spectrum * (2 * scale / n)
        dmodes[:, 0] /= 2
        if n % 2 == 0 and dmodes.shape[1] > n // 2 > 0:
            dmodes[:, n // 2] /= 2
    return result


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


@torch.library.custom_op("mrconv::synthesize_with_taps", mutates_args=())
def _synthesize_with_taps(
    modes: Tensor, taps: Tensor, weights: Tensor, index: Tensor, lengths: list[int], scales: list[float], triton: bool
) -> Tensor:
    dtype = compute_dtype(modes)
    modes, taps, weights = (x.to(dtype).contiguous() for x in (modes, taps, weights))
    if triton:
        from . import triton_kernels

        return triton_kernels.synthesize(modes, lengths, scales, (taps, index.contiguous(), weights))
    smooth = (
        _by_fft(modes, lengths, scales)
        * weights[0].repeat_interleave(constants(lengths, modes), 0, output_size=sum(lengths)).t()
    )
    return smooth.index_add_(1, _offset(index, lengths), (taps * weights[1][..., None]).transpose(0, 1).flatten(1))


@torch.library.custom_op("mrconv::synthesize_with_taps_backward", mutates_args=())
def _synthesize_with_taps_backward(
    grad: Tensor,
    modes: Tensor,
    taps: Tensor,
    weights: Tensor,
    index: Tensor,
    lengths: list[int],
    scales: list[float],
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(modes)
    wide = tuple(x.to(dtype).contiguous() for x in (modes, taps, weights))
    if triton:
        from . import triton_kernels

        dmodes = triton_kernels.analyse(grad.contiguous(), lengths, scales, modes.shape)
        grads = triton_kernels.weight(grad.contiguous(), dmodes, wide, index.contiguous(), lengths)
    else:
        dmodes, (N, C, T) = _by_fft_backward(grad, modes, lengths, scales), taps.shape
        at_taps = grad[:, _offset(index, lengths)].view(C, N, T).transpose(0, 1)
        dweights = torch.stack([(wide[0] * dmodes).sum((2, 3)), (wide[1] * at_taps).sum(2)])
        grads = wide[2][0][..., None, None] * dmodes, wide[2][1][..., None] * at_taps, dweights
    dmodes, dtaps, dweights = (g.to(x.dtype) for g, x in zip(grads, (modes, taps, weights), strict=True))
    return dmodes, dtaps.contiguous(), dweights


def _offset(index: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return positions (N * T,) in the concatenated kernels."""
    return (index + constants([0, *accumulate(lengths)][:-1], index)[:, None]).flatten()


@_synthesize_with_taps.register_fake
def _(modes, taps, weights, index, lengths, scales, triton):  # type: ignore[no-untyped-def]
    return modes.new_empty(modes.shape[1], sum(lengths), dtype=compute_dtype(modes))


@_synthesize_with_taps_backward.register_fake
def _(grad, modes, taps, weights, index, lengths, scales, triton):  # type: ignore[no-untyped-def]
    return empty_contiguous(modes, taps, weights)


def _setup_with_taps(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward_with_taps(ctx, grad):  # type: ignore[no-untyped-def]
    return *_synthesize_with_taps_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


_synthesize_with_taps.register_autograd(_backward_with_taps, setup_context=_setup_with_taps)
