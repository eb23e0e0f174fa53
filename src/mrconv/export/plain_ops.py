"""The ops of mrconv in plain torch operators that every exporter supports.

Measured in onnxruntime, the fastest forms are a depthwise convolution up to MAX_DIRECT lags, beyond that shifts for up
to MAX_SHIFTS taps, and FFTs for all other kernels. FFTs are matrix products in ONNX files and `torch.fft` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import Lags, compute_dtype
from .dft_matmul import circular_conv

MAX_DIRECT, MAX_SHIFTS = 64, 32


def convolve(
    u: Tensor, values: Tensor, lags: Lags, bias: Tensor | None, gelu: bool, longest: int, matmul_dft: bool
) -> Tensor:
    """Compute `ops.conv` of u (B, C, L); every size except B and L is a constant of the graph.

    FFTs are valid for L up to `longest`, the other forms for any length. With `matmul_dft`, FFTs are matrix products.
    """
    x, values = (z.to(compute_dtype(u, values)) for z in (u, values))
    ahead, behind = max(0, -min(lags)), max(0, max(lags))
    if ahead + behind < MAX_DIRECT:
        kernel = _dense(values, lags, ahead).flip(1)[:, None]
        y = F.conv1d(F.pad(x, (behind, ahead)), kernel, groups=x.shape[1])
    elif len(lags) <= MAX_SHIFTS:
        padded = F.pad(x.mT, (0, 0, behind, ahead))  # compilers vectorise over the last dimension
        shifted = [padded[:, behind - lag : behind - lag + x.shape[2]] for lag in lags]
        y = values[:, 0] * shifted[0]
        for i in range(1, len(lags)):
            y = torch.addcmul(y, values[:, i], shifted[i])
        y = y.mT
    else:
        y = _fft_conv(x, _dense(values, lags, ahead), ahead, longest, matmul_dft)
    y = y if bias is None else y + bias[:, None]
    return (F.gelu(y) if gelu else y).to(u.dtype)


def _dense(values: Tensor, lags: Lags, ahead: int) -> Tensor:
    """Return the kernel at all lags from -ahead on; `ops.densify` reads a tensor of indices, which cannot be traced."""
    if isinstance(lags, range):
        return values
    pieces, end = [], -ahead
    for column, lag in sorted(zip(values.split(1, 1), lags, strict=True), key=lambda tap: tap[1]):
        pieces += [values.new_zeros(values.shape[0], lag - end), column]
        end = lag + 1
    return torch.cat(pieces, 1)


def _fft_conv(x: Tensor, kernel: Tensor, ahead: int, longest: int, matmul_dft: bool) -> Tensor:
    """Convolve by FFTs of one length, at which no output of the longest input wraps around."""
    kernel = kernel[:, max(0, ahead + 1 - longest) : ahead + longest]  # lags that the longest input has
    ahead = min(ahead, longest - 1)
    n = max(16, 1 << (longest + max(ahead, kernel.shape[1] - 1 - ahead) - 1).bit_length())
    if matmul_dft:  # the size of `padding` is negative for a longer input, which an ONNX runtime rejects
        padding = x.new_zeros(x.shape[0], x.shape[1], longest - x.shape[2])
        y = circular_conv(F.pad(torch.cat([x, padding], 2), (0, n - longest)), kernel, n)
    else:
        padded = F.pad(x, (0, n - x.shape[2]))
        y = torch.fft.irfft(torch.fft.rfft(padded) * torch.fft.rfft(kernel, n), n)
    return y[..., ahead : ahead + x.shape[2]]


def decompositions(longest: int, matmul_dft: bool) -> dict[Any, Callable[..., Any]]:
    """Return the replacement of each op, for `ExportedProgram.run_decompositions`."""

    def dense(u: Tensor, kernel: Tensor, bias: Tensor | None, lengths: None, lead: int, gelu: bool) -> Tensor:
        return convolve(u, kernel, range(-lead, kernel.shape[1] - lead), bias, gelu, longest, matmul_dft)

    ops = torch.ops.mrconv
    return {
        ops.fft_conv.default: lambda u, kernel, bias, spectrum, lengths, lead, gelu, triton: dense(
            u, kernel, bias, lengths, lead, gelu
        ),
        ops.toeplitz_conv.default: dense,
        ops.tap_conv.default: lambda u, values, bias, lags, gelu, triton: convolve(
            u, values, tuple(lags), bias, gelu, longest, matmul_dft
        ),
    }
