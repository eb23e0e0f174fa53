"""Convolution as Toeplitz matrix products on tensor cores."""
