"""Pure functions on tensors of shape (batch, channels, length), each tested against a reference in plain torch."""

from ._common import Lags, Taps, compute_dtype, constants, triton_unavailable
from .branch_sum.normalization import BranchWeights
from .branch_sum.op import BranchSum, ConstantKernels, Kernels, ModeKernels, Normalization, PackedKernels, branch_sum
from .branch_sum.reference import branch_sum_reference
from .branch_sum.running_statistics import RunningStatistics, update_running_statistics
from .branch_sum.statistics import mean_and_variance
from .branch_sum.subsampled import subsampled_branch_sum
from .conv import conv, conv_reference
from .fft_conv.op import fft_conv, kernel_spectrum
from .fft_conv.reference import fft_conv_reference
from .fft_conv.spectra import fast_length
from .kernel_taps import around_zero, dense_taps, densify
from .masking.op import mask_positions, mask_sequences
from .merge.op import merge
from .moving_sum_conv.op import moving_sum_conv
from .moving_sum_conv.reference import moving_sum_conv_reference
from .select import Algorithm, BranchShape, Selection, select_branch_sum, select_conv
from .synthesis.op import Mixture, synthesize, synthesize_packed, synthesize_with_taps
from .synthesis.reference import synthesize_reference, synthesize_with_taps_reference
from .tap_conv.op import tap_conv
from .tap_conv.reference import tap_conv_reference
from .toeplitz_conv.op import toeplitz_conv

__all__ = [
    "Algorithm",
    "BranchShape",
    "BranchSum",
    "BranchWeights",
    "ConstantKernels",
    "Kernels",
    "Lags",
    "Mixture",
    "ModeKernels",
    "Normalization",
    "PackedKernels",
    "RunningStatistics",
    "Selection",
    "Taps",
    "around_zero",
    "branch_sum",
    "branch_sum_reference",
    "compute_dtype",
    "constants",
    "conv",
    "conv_reference",
    "dense_taps",
    "densify",
    "fast_length",
    "fft_conv",
    "fft_conv_reference",
    "kernel_spectrum",
    "mask_positions",
    "mask_sequences",
    "mean_and_variance",
    "merge",
    "moving_sum_conv",
    "moving_sum_conv_reference",
    "select_branch_sum",
    "select_conv",
    "subsampled_branch_sum",
    "synthesize",
    "synthesize_packed",
    "synthesize_reference",
    "synthesize_with_taps",
    "synthesize_with_taps_reference",
    "tap_conv",
    "tap_conv_reference",
    "toeplitz_conv",
    "triton_unavailable",
    "update_running_statistics",
]
