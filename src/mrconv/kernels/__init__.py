"""Kernel parameterisations, all behind one protocol (`Kernel`): parameters -> a kernel per resolution."""

from .base import IntegerBuffers, Kernel, kernel_class, kernel_names, register_kernel, resampled
from .dense import DenseKernel
from .dilated import DilatedKernel
from .fourier import FourierKernel
from .rescaled import FourierSparseKernel
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
