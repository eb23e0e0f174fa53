"""Kernel parameterisations with one interface (`Kernel`): parameters -> a kernel per resolution."""

from .dense import DenseKernel
from .dilated import DilatedKernel
from .fourier import FourierKernel
from .fourier_sparse import FourierSparseKernel
from .protocol import CachedIntegerBuffers, Kernel, kernel_class, kernel_names, register_kernel, resampled
from .sparse import SparseKernel

__all__ = [
    "CachedIntegerBuffers",
    "DenseKernel",
    "DilatedKernel",
    "FourierKernel",
    "FourierSparseKernel",
    "Kernel",
    "SparseKernel",
    "kernel_class",
    "kernel_names",
    "register_kernel",
    "resampled",
]
