"""Fourier kernels: a few low-frequency modes at every resolution."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import compute_dtype, synthesize
from .base import Kernel, register_kernel, resampled


@register_kernel("fourier")
class FourierKernel(Kernel):
    """l0 // 2 + 1 complex modes, zero-padded and inverse-transformed to length l_i (orthonormal at rate 1).

    The modes are stored as real pairs (N, channels, l0 // 2 + 1, 2).
    """

    continuous = True

    def build(self, seed: int, **factory: Any) -> None:
        """Create the modes."""
        shape = (len(self.lengths), self.channels, self.kernel_size // 2 + 1, 2)
        self.modes = nn.Parameter(torch.empty(shape, **factory))

    def reset_parameters(self) -> None:
        """Draw normal modes, of one size per resolution, such that the kernel's expected energy is 1."""
        for modes, length in zip(self.modes.detach(), self.lengths, strict=True):
            inner = modes.shape[1] - 1  # modes with two free parts, each counted twice by the inverse FFT
            nyquist = inner > 0 and 2 * inner == length  # there, one part, counted once
            nn.init.normal_(modes, std=(1 + 4 * inner - 3 * nyquist) ** -0.5)

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the kernels, sampled at this rate from the same modes."""
        return [self._kernel(i, rate, delay) for i in range(len(self.lengths))]

    def _kernel(self, i: int, rate: float, delay: float) -> Tensor:
        modes, length = self.modes[i].to(compute_dtype(self.modes)), self.lengths[i]
        n = resampled(length, rate)
        inner = modes.shape[1] - 1
        if n > length and inner > 0 and 2 * inner == length:
            # What was the real Nyquist mode is an inner one on a finer grid: half of it at each of +-m.
            last = modes[:, -1:] * modes.new_tensor([0.5, 0.0])
            modes = torch.cat([modes[:, :-1], last], 1)
        if delay:
            m = torch.arange(modes.shape[1], device=modes.device, dtype=modes.dtype)
            angle = 2 * math.pi * delay / length * m
            real, imaginary = modes.unbind(-1)
            cos, sin = angle.cos(), angle.sin()
            modes = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
        return math.sqrt(length) * synthesize(modes, n)
