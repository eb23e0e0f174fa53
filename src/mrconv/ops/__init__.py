"""Pure functions on tensors of shape (batch, channels, length), each tested against a plain reference."""

from .branch_sum.moving_sum import mode_branch_sum, window_branch_sum
from .branch_sum.spectral import spectral_branch_sum
from .branch_sum.statistics import mean_and_variance
from .fft_conv.op import compute_dtype, fft_conv, fft_conv_reference, kernel_spectrum, per_tap
from .fft_conv.spectra import fast_length
from .select import (
    Choice,
    Lags,
    Taps,
    branch_sum,
    branch_sum_reference,
    choose_branch_sum,
    choose_conv,
    choose_wave_sum,
    conv,
    conv_reference,
    densify,
    merge,
)
from .synthesis.op import synthesize, synthesize_reference
from .tap_conv.op import tap_branch_sum, tap_conv, tap_conv_reference
from .toeplitz_conv.op import toeplitz_branch_sum, toeplitz_conv

__all__ = [
    "Choice",
    "Lags",
    "Taps",
    "branch_sum",
    "branch_sum_reference",
    "choose_branch_sum",
    "choose_conv",
    "choose_wave_sum",
    "compute_dtype",
    "conv",
    "conv_reference",
    "densify",
    "fast_length",
    "fft_conv",
    "fft_conv_reference",
    "kernel_spectrum",
    "mean_and_variance",
    "merge",
    "mode_branch_sum",
    "per_tap",
    "spectral_branch_sum",
    "synthesize",
    "synthesize_reference",
    "tap_branch_sum",
    "tap_conv",
    "tap_conv_reference",
    "toeplitz_branch_sum",
    "toeplitz_conv",
    "window_branch_sum",
]
