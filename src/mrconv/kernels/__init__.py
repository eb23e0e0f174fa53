"""Kernel parameterisations, all behind one protocol (`Kernel`): parameters -> a kernel per resolution."""

from .dense import DenseKernel
from .dilated import DilatedKernel
from .fourier import FourierKernel
from .fourier_sparse import FourierSparseKernel
from .protocol import IntegerBuffers, Kernel, kernel_class, kernel_names, register_kernel, resampled
from .sparse import SparseKernel

__all__ = [
    "DenseKernel",
    "DilatedKernel",
    "FourierKernel",
    "FourierSparseKernel",
    "IntegerBuffers",
    "Kernel",
    "SparseKernel",
    "kernel_class",
    "kernel_names",
    "register_kernel",
    "resampled",
]
