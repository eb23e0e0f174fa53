"""The ops of mrconv in plain torch that every exporter knows: real in and out, graphs that stay as they are.

Which is fastest was measured in onnxruntime: a plain convolution up to DIRECT lags, beyond that shifts for up to SHIFTS
taps, and FFTs for everything else; there as matrix products, elsewhere by `torch.fft`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import Lags, compute_dtype
from .dft_matmul import circular

DIRECT, SHIFTS = 64, 32


def convolve(
    u: Tensor, values: Tensor, lags: Lags, bias: Tensor | None, gelu: bool, longest: int, products: bool
) -> Tensor:
    """Compute `ops.conv` of u (B, C, L); every size but B and L is a constant of the graph.

    FFTs are for L up to `longest`, the other forms are right for any; with `products` they are matrix products.
    """
    x, values = (z.to(compute_dtype(u, values)) for z in (u, values))
    ahead, behind = max(0, -min(lags)), max(0, max(lags))
    if ahead + behind < DIRECT:
        kernel = _dense(values, lags, ahead).flip(1)[:, None]
        y = F.conv1d(F.pad(x, (behind, ahead)), kernel, groups=x.shape[1])
    elif len(lags) <= SHIFTS:
        padded = F.pad(x.mT, (0, 0, behind, ahead))  # channels last, over which compilers vectorise
        shifted = [padded[:, behind - lag : behind - lag + x.shape[2]] for lag in lags]
        y = values[:, 0] * shifted[0]
        for i in range(1, len(lags)):
            y = torch.addcmul(y, values[:, i], shifted[i])
        y = y.mT
    else:
        y = _spectral(x, _dense(values, lags, ahead), ahead, longest, products)
    y = y if bias is None else y + bias[:, None]
    return (F.gelu(y) if gelu else y).to(u.dtype)


def _dense(values: Tensor, lags: Lags, ahead: int) -> Tensor:
    """Return the kernel at all lags from -ahead on; `ops.densify` makes a tensor of indices, which cannot be traced."""
    if isinstance(lags, range):
        return values
    pieces, at = [], -ahead
    for column, lag in sorted(zip(values.split(1, 1), lags, strict=True), key=lambda tap: tap[1]):
        pieces += [values.new_zeros(values.shape[0], lag - at), column]
        at = lag + 1
    return torch.cat(pieces, 1)


def _spectral(x: Tensor, kernel: Tensor, ahead: int, longest: int, products: bool) -> Tensor:
    """Convolve by FFTs of one length, in which no needed output of the longest input wraps around."""
    kernel = kernel[:, max(0, ahead + 1 - longest) : ahead + longest]  # what the longest input sees of it
    ahead = min(ahead, longest - 1)
    n = max(16, 1 << (longest + max(ahead, kernel.shape[1] - 1 - ahead) - 1).bit_length())
    if products:  # a longer input would need less than no zeros behind it, where an ONNX runtime stops
        rest = x.new_zeros(x.shape[0], x.shape[1], longest - x.shape[2])
        y = circular(F.pad(torch.cat([x, rest], 2), (0, n - longest)), kernel, n)
    else:
        padded = F.pad(x, (0, n - x.shape[2]))
        y = torch.fft.irfft(torch.fft.rfft(padded) * torch.fft.rfft(kernel, n), n)
    return y[..., ahead : ahead + x.shape[2]]


def decompositions(longest: int, products: bool) -> dict[Any, Callable[..., Any]]:
    """Return what to put in place of each op, for `ExportedProgram.run_decompositions`."""

    def dense(u: Tensor, kernel: Tensor, bias: Tensor | None, lead: int, gelu: bool) -> Tensor:
        return convolve(u, kernel, range(-lead, kernel.shape[1] - lead), bias, gelu, longest, products)

    ops = torch.ops.mrconv
    return {
        ops.fft_conv.default: lambda u, kernel, bias, spectrum, lead, gelu, triton: dense(u, kernel, bias, lead, gelu),
        ops.toeplitz_conv.default: dense,
        ops.tap_conv.default: lambda u, values, bias, lags, gelu, triton: convolve(
            u, values, tuple(lags), bias, gelu, longest, products
        ),
    }
