"""Weighted sum of kernels."""
