"""Exact streaming inference: states, algorithms and the state-space form of Fourier kernels."""
