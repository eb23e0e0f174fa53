"""Pure functions on tensors of shape (batch, channels, length), each with a plain reference beside it."""

from .dispatch import Lags, Taps, conv, conv_reference, densify, merge, moments
from .fft import compute_dtype, fast_length, fft_conv, fft_conv_reference
from .modes import synthesize, synthesize_reference
from .moments import moments_reference, spectral_moments
from .taps import tap_conv, tap_conv_reference, tap_moments

__all__ = [
    "Lags",
    "Taps",
    "compute_dtype",
    "conv",
    "conv_reference",
    "densify",
    "fast_length",
    "fft_conv",
    "fft_conv_reference",
    "merge",
    "moments",
    "moments_reference",
    "spectral_moments",
    "synthesize",
    "synthesize_reference",
    "tap_conv",
    "tap_conv_reference",
    "tap_moments",
]
