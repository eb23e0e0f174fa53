"""Circular convolution by discrete Fourier transforms written as matrix products of real numbers.

A transform of n = n1 n2 points, with t = n2 a + b and k = k1 + n1 k2, is a matrix product over a, a multiplication by
twiddle factors, and a matrix product over b: one Cooley-Tukey step. For a real signal the frequencies k1 > n1 / 2 are
conjugates of the others and are omitted. In onnxruntime this is several times as fast as its DFT operator, and not
every runtime has such an operator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


class MatmulDFT:
    """Real transform of n points, a power of two of at least 16, between (..., n) and (..., n1 / 2 + 1, 2 n2)."""

    def __init__(self, n: int, like: Tensor) -> None:
        self.n, self.n1 = n, 1 << (n.bit_length() - 1) // 2
        self.m, self.n2 = self.n1 // 2 + 1, n // self.n1
        self.first = self._phases(self.m, self.n1, self.n1, like)
        self.twiddle = self._phases(self.m, self.n2, n, like)
        cos, sin = self._phases(self.n2, self.n2, self.n2, like)
        self.second = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the spectrum, with the real parts before the imaginary parts in the last dimension."""
        cos, sin = self.first
        real, imaginary = (torch.cat([cos, -sin]) @ x.unflatten(-1, (self.n1, self.n2))).split(self.m, -2)
        cos, sin = self.twiddle
        return torch.cat([real * cos + imaginary * sin, imaginary * cos - real * sin], -1) @ self.second

    def inverse(self, spectrum: Tensor) -> Tensor:
        """Return the real signal of a spectrum."""
        real, imaginary = (spectrum @ self.second.t()).split(self.n2, -1)
        cos, sin = self.twiddle
        rotated = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -2)
        weight = F.pad(self.twiddle.new_full((self.m - 2, 1), 2 / self.n), (0, 0, 1, 1), value=1 / self.n)
        cos, sin = self.first * weight
        return (torch.cat([cos, -sin]).t() @ rotated).flatten(-2)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two spectra."""
        (a_real, a_imaginary), (b_real, b_imaginary) = (z.split(self.n2, -1) for z in (a, b))
        real = a_real * b_real - a_imaginary * b_imaginary
        return torch.cat([real, a_real * b_imaginary + a_imaginary * b_real], -1)

    @staticmethod
    def _phases(rows: int, columns: int, period: int, like: Tensor) -> Tensor:
        """Return cos and sin of 2 pi i j / period, (2, rows, columns)."""
        i, j = (torch.arange(count, device=like.device) for count in (rows, columns))
        angle = (2 * math.pi / period) * (i[:, None] * j % period).double()
        return torch.stack([angle.cos(), angle.sin()]).to(like.dtype)


def circular_conv(x: Tensor, kernel: Tensor, n: int) -> Tensor:
    """Return the circular convolution of x (B, C, n) with kernels (C, up to n)."""
    dft = MatmulDFT(n, x)
    spectrum = dft.forward(F.pad(kernel, (0, n - kernel.shape[1])))
    return dft.inverse(dft.multiply(dft.forward(x), spectrum))
