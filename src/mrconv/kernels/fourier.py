"""Fourier kernels: a few low-frequency modes at every resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import compute_dtype, synthesize, synthesize_packed
from .protocol import Kernel, register_kernel, resampled


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
        self._factors = _factors(self.lengths, shape[2])

    def reset_parameters(self) -> None:
        """Draw normal modes with one standard deviation per resolution, so that the kernel's expected energy is 1."""
        for modes, length in zip(self.modes.detach(), self.lengths, strict=True):
            inner = modes.shape[1] - 1  # modes with two real parameters, each of which the inverse FFT counts twice
            nyquist = inner > 0 and 2 * inner == length  # one real parameter, counted once
            nn.init.normal_(modes, std=(1 + 4 * inner - 3 * nyquist) ** -0.5)

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the kernels, sampled at this rate from the same modes."""
        sizes = [resampled(n, rate) for n in self.lengths]
        modes = self.modes.to(compute_dtype(self.modes))
        if self.constant:
            return list(torch._foreach_mul(modes[:, :, 0, :1].unbind(0), self.constant_values(rate)[1]))
        if rate != 1:
            pairs = zip(modes.unbind(0), self.lengths, sizes, strict=True)
            modes = torch.stack([_resample(branch, n, size, delay) for branch, n, size in pairs])
        return synthesize(modes, sizes, [n**0.5 for n in self.lengths])

    @property
    def constant(self) -> bool:
        """Whether the only mode is the constant one."""
        return self.modes.shape[2] == 1

    @classmethod
    def packed(cls, directions: Sequence[Kernel], counts: Sequence[int]) -> Tensor | None:
        """Return the first taps of all kernels."""
        kernels = [kernel for kernel in directions if isinstance(kernel, FourierKernel)]
        lengths = [n for kernel in kernels for n in kernel.lengths]
        return synthesize_packed([kernel.modes for kernel in kernels], lengths, counts, [n**0.5 for n in lengths])

    def constant_values(self, rate: float = 1.0) -> tuple[Tensor, list[float]]:
        """Return the modes, and their factors in the inverse FFT."""
        return self.modes, [n**0.5 / resampled(n, rate) for n in self.lengths]

    @property
    def moving_modes(self) -> int:
        """The number of modes if it is 2 or 3, else 0."""
        M = self.modes.shape[2]
        return M if M in (2, 3) else 0

    def mode_values(self) -> tuple[Tensor, Sequence[float]]:
        """Return the modes, and their factors in the inverse FFT."""
        return self.modes, self._factors


def _factors(lengths: Sequence[int], modes: int) -> tuple[float, ...]:
    """Return the factors of real and imaginary part of each mode of each length, in order."""
    factors: list[float] = []
    for n in lengths:
        for m in range(modes):
            single = m == 0 or 2 * m == n
            factor = 0.0 if 2 * m > n else (1.0 if single else 2.0) * n**-0.5
            factors += [factor, 0.0 if single else -factor]
    return tuple(factors)


def _resample(modes: Tensor, length: int, size: int, delay: float) -> Tensor:
    """Return the modes (C, M, 2) of a kernel of `length`, resampled to `size` taps and delayed by `delay`."""
    inner = modes.shape[1] - 1
    if size > length and 2 * inner == length:
        # The real Nyquist mode becomes an inner mode on a finer grid: half of it at each of +-m.
        modes = torch.cat([modes[:, :-1], modes[:, -1:] * modes.new_tensor([0.5, 0.0])], 1)
    angle = 2 * math.pi * delay / length * torch.arange(inner + 1, device=modes.device, dtype=modes.dtype)
    real, imaginary = modes.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
