"""Depthwise convolution with one kernel of taps at any lags, by the cheapest algorithm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._common import Lags
from .fft_conv.op import fft_conv
from .fft_conv.reference import fft_conv_reference
from .kernel_taps import around_zero, dense_taps
from .masking.op import mask_sequences
from .select import Algorithm, select_conv
from .tap_conv.op import tap_conv
from .tap_conv.reference import tap_conv_reference
from .toeplitz_conv.op import toeplitz_conv


def conv(
    u: Tensor,
    values: Tensor,
    lags: Lags,
    bias: Tensor | None = None,
    gelu: bool = False,
    backend: str = "auto",
    lengths: Tensor | None = None,
    spectrum: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """Convolve u (B, C, L) with values (C, T) at lags, add bias (C,), apply GELU if `gelu`; the output is like u.

    Positions from `lengths` (B,) on are treated as zero in u and are zero in the output. `spectrum` is
    called if the convolution runs by FFT, and returns the argument of `fft_conv`.
    """
    algorithm = select_conv(u, lags, backend).algorithm
    around = algorithm is Algorithm.TAPS or torch.compiler.is_exporting()  # exporters replace ops without lengths
    if lengths is not None and around:
        return mask_sequences(conv(mask_sequences(u, lengths), values, lags, bias, gelu, backend), lengths)
    if algorithm is Algorithm.TAPS:
        return tap_conv(u, values, tuple(lags), bias, gelu, backend)
    kernel, lead = around_zero(*dense_taps(values, lags))
    if algorithm is Algorithm.TOEPLITZ:
        return toeplitz_conv(u, kernel, lead, bias, gelu, lengths)
    return fft_conv(u, kernel, lead, bias, gelu, backend, spectrum(), lengths)


def conv_reference(u: Tensor, values: Tensor, lags: Lags, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """Compute `conv` by plain differentiable torch."""
    if isinstance(lags, range):
        return fft_conv_reference(u, *around_zero(values, lags), bias, gelu)
    return tap_conv_reference(u, values, lags, bias, gelu)
