"""Kernels from low-frequency Fourier modes, stored as real pairs, and optionally from scattered taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fft import irfft, rfft
from torch.nn import functional as F

from .._common import compute_dtype, constants, empty_contiguous, reject_forward_mode, use_triton
from .._registration import eager_op


class Mixture(NamedTuple):
    """Weights (2, N, C) of synthesized kernels and of scattered taps (N, C, J) at distinct positions (N, J)."""

    weights: Tensor
    taps: Tensor
    positions: Tensor


def synthesize(modes: Tensor, lengths: Sequence[int], scales: Sequence[float], backend: str = "auto") -> list[Tensor]:
    """Return the inverse real FFT (C, n), times a scale, of the lowest modes (N, C, M, 2) for each length n."""
    return list(synthesize_packed([modes], lengths, lengths, scales, (), backend).split(list(lengths), 1))


def synthesize_with_taps(
    modes: Tensor,
    taps: Tensor,
    index: Tensor,
    weights: Tensor,
    lengths: Sequence[int],
    scales: Sequence[float],
    backend: str = "auto",
) -> list[Tensor]:
    """Return weights[0] times the kernels of `synthesize` plus weights[1] times scattered taps: see `Mixture`."""
    mixture = Mixture(weights, taps, index)
    return list(synthesize_packed([modes], lengths, lengths, scales, [mixture], backend).split(list(lengths), 1))


def synthesize_packed(
    modes: Sequence[Tensor],
    lengths: Sequence[int],
    counts: Sequence[int],
    scales: Sequence[float],
    mixtures: Sequence[Mixture] = (),
    backend: str = "auto",
) -> Tensor:
    """Return the first `counts` taps of the kernels of one or two directions, (C, sum of counts).

    `modes` and, if kernels are mixed with scattered taps, `mixtures` have an item for each direction; lengths, counts
    and scales have one for each kernel of all directions. In Triton this is one launch.
    """
    each = (modes, *(zip(*mixtures, strict=True) if mixtures else ((), (), ())))
    tensors = [x for several in each for x in (*several, None, None)[:2]]
    reject_forward_mode(*tensors)
    return _synthesize(*tensors, list(lengths), list(counts), list(scales), use_triton(modes[0], backend))


_TENSORS = (
    "Tensor modes, Tensor? modes2, Tensor? weights, Tensor? weights2, Tensor? taps, Tensor? taps2, "
    "Tensor? index, Tensor? index2"
)
_LAYOUT = "int[] lengths, int[] counts, float[] scales, bool triton"


@eager_op("synthesize", schema=f"({_TENSORS}, {_LAYOUT}) -> Tensor")
def _synthesize(*arguments):  # type: ignore[no-untyped-def]
    tensors, layout, triton = arguments[:8], arguments[8:11], arguments[11]
    if triton:
        from . import triton_kernels

        return triton_kernels.synthesize(tensors, *layout)
    kernels = []
    for (modes, weights, taps, index), lengths, counts, scales in _directions(tensors, *layout):
        kernel = _by_fft(modes, lengths, scales)
        if weights is not None:
            smooth, sparse = weights.to(kernel.dtype)
            kernel *= smooth.repeat_interleave(constants(lengths, modes), 0, output_size=sum(lengths)).t()
            kernel.index_add_(1, _offset(index, lengths), (taps * sparse[..., None]).transpose(0, 1).flatten(1))
        kernels += [k[:, :count] for k, count in zip(kernel.split(lengths, 1), counts, strict=True)]
    return torch.cat(kernels, 1)


@eager_op(
    "synthesize_backward",
    schema=f"(Tensor grad, {_TENSORS}, {_LAYOUT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _synthesize_backward(grad, *arguments):  # type: ignore[no-untyped-def]
    """Return the gradients of modes, weights and taps of both directions; empty for missing ones."""
    tensors, layout, triton = arguments[:8], arguments[8:11], arguments[11]
    if triton:
        from . import triton_kernels

        gradients = triton_kernels.analyse(grad, tensors, *layout)
        return tuple(grad.new_empty(0) if x is None else x for x in gradients)
    both, first = [], 0
    for (modes, weights, taps, index), lengths, counts, scales in _directions(tensors, *layout):
        parts = grad[:, first : first + sum(counts)].split(counts, 1)
        g = torch.cat([F.pad(x, (0, n - x.shape[1])) for x, n in zip(parts, lengths, strict=True)], 1)
        both.append(_gradients(g, modes, weights, taps, index, lengths, scales))
        first += sum(counts)
    both += [(None,) * 3] * (2 - len(both))
    return tuple(grad.new_empty(0) if x is None else x for pair in zip(*both, strict=True) for x in pair)


def _gradients(grad, modes, weights, taps, index, lengths, scales):  # type: ignore[no-untyped-def]
    """Return the gradients of one direction's modes, weights and taps; None for missing ones."""
    dmodes = _by_fft_backward(grad, modes, lengths, scales)
    if weights is None:
        return dmodes.to(modes.dtype), None, None
    N, C, J = taps.shape
    at_taps = grad[:, _offset(index, lengths)].view(C, N, J).transpose(0, 1)
    dweights = torch.stack([(modes * dmodes).sum((2, 3)), (taps * at_taps).sum(2)]).to(weights.dtype)
    dmodes, dtaps = weights[0][..., None, None] * dmodes, weights[1][..., None] * at_taps
    return dmodes.to(modes.dtype), dweights, dtaps.to(taps.dtype, memory_format=torch.contiguous_format)


def _directions(
    tensors: Sequence[Tensor | None], *layout: Sequence[Any]
) -> Iterator[tuple[tuple[Any, ...], list[Any], list[Any], list[Any]]]:
    """Yield modes, weights, taps and index of each direction, and its part of lengths, counts and scales."""
    for d in range(2):
        modes = tensors[d]
        if modes is not None:
            lengths, counts, scales = (list(each[d * len(modes) : (d + 1) * len(modes)]) for each in layout)
            yield tuple(tensors[d::2]), lengths, counts, scales


def _offset(index: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return positions (N * J,) in the concatenated kernels."""
    return (index + constants([0, *accumulate(lengths)][:-1], index)[:, None]).flatten()


def _by_fft(modes: Tensor, lengths: Sequence[int], scales: Sequence[float]) -> Tensor:
    """Return the kernels (C, sum of lengths), concatenated."""
    spectra = torch.view_as_complex(modes.to(compute_dtype(modes), memory_format=torch.contiguous_format, copy=True))
    spectra.imag[:, :, 0] = 0  # cuFFT would add it to the result at some lengths
    for spectrum, n in zip(spectra, lengths, strict=True):
        if n % 2 == 0 and spectrum.shape[1] > n // 2:
            spectrum.imag[:, n // 2] = 0
    branches = zip(spectra, lengths, scales, strict=True)
    return torch.cat([irfft(scale * spectrum[:, : n // 2 + 1], n) for spectrum, n, scale in branches], 1)


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
def _(modes, *rest):  # type: ignore[no-untyped-def]
    return modes.new_empty(modes.shape[1], sum(rest[-3]), dtype=compute_dtype(modes))


@_synthesize_backward.register_fake
def _(grad, *arguments):  # type: ignore[no-untyped-def]
    return tuple(grad.new_empty(0) if x is None else empty_contiguous(x)[0] for x in arguments[:6])


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.layout = inputs[8:]
    ctx.save_for_backward(*inputs[:8])


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    tensors = ctx.saved_tensors
    gradients = _synthesize_backward(grad, *tensors, *ctx.layout)
    return *(None if x is None else g for g, x in zip(gradients, tensors, strict=False)), *[None] * 6


_synthesize.register_autograd(_backward, setup_context=_setup)
