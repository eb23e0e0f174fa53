"""Convolution with a sum of constant kernels, as moving sums."""
