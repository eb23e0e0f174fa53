"""Circular convolution by discrete Fourier transforms that are matrix products: real numbers and plain MatMul only.

A transform of n = n1 n2 points, t = n2 a + b and k = k1 + n1 k2, is a product over a, a turn of each number, and a
product over b (Cooley and Tukey's step, taken once). Of a real signal the k1 above n1 / 2 are mirror images of the
others and left out. In onnxruntime this is several times as fast as its DFT, and other runtimes have no DFT at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


class Transform:
    """A real transform of n points, a power of two from 16 on, between (..., n) and (..., n1 / 2 + 1, 2 n2)."""

    def __init__(self, n: int, like: Tensor) -> None:
        self.n, self.n1 = n, 1 << (n.bit_length() - 1) // 2
        self.m, self.n2 = self.n1 // 2 + 1, n // self.n1
        self.first = self._phases(self.m, self.n1, self.n1, like)
        self.turn = self._phases(self.m, self.n2, n, like)
        cos, sin = self._phases(self.n2, self.n2, self.n2, like)
        self.second = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the spectrum, real parts before imaginary ones in the last dimension."""
        cos, sin = self.first
        real, imaginary = (torch.cat([cos, -sin]) @ x.unflatten(-1, (self.n1, self.n2))).split(self.m, -2)
        cos, sin = self.turn
        return torch.cat([real * cos + imaginary * sin, imaginary * cos - real * sin], -1) @ self.second

    def inverse(self, spectrum: Tensor) -> Tensor:
        """Return the real signal."""
        real, imaginary = (spectrum @ self.second.t()).split(self.n2, -1)
        cos, sin = self.turn
        turned = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -2)
        weight = F.pad(self.turn.new_full((self.m - 2, 1), 2 / self.n), (0, 0, 1, 1), value=1 / self.n)
        cos, sin = self.first * weight
        return (torch.cat([cos, -sin]).t() @ turned).flatten(-2)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two spectra."""
        (real, imaginary), (other, another) = (z.split(self.n2, -1) for z in (a, b))
        return torch.cat([real * other - imaginary * another, real * another + imaginary * other], -1)

    @staticmethod
    def _phases(rows: int, columns: int, period: int, like: Tensor) -> Tensor:
        """Return cos and sin of 2 pi i j / period, (2, rows, columns)."""
        i, j = (torch.arange(count, device=like.device) for count in (rows, columns))
        angle = (2 * math.pi / period) * (i[:, None] * j % period).double()
        return torch.stack([angle.cos(), angle.sin()]).to(like.dtype)


def circular(x: Tensor, kernel: Tensor, n: int) -> Tensor:
    """Return the circular convolution of x (B, C, n) with kernels (C, up to n)."""
    by = Transform(n, x)
    spectrum = by.forward(F.pad(kernel, (0, n - kernel.shape[1])))
    return by.inverse(by.multiply(by.forward(x), spectrum))
