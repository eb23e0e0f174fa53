"""Kernels from low-frequency Fourier modes."""
