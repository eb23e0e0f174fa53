"""Exact streaming inference: state, algorithms and the state-space form of Fourier kernels."""
