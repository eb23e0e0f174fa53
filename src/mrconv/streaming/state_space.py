"""Fourier kernels as state-space models: an exact sliding form, and the form of the paper's appendix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..branches import Branches
from ..kernels import FourierKernel, resampled
from ..norm import running_affine


@dataclass(frozen=True)
class SlidingSSM:
    """N resolutions of M modes each, over a sliding window of the input: exact and diagonal.

    Resolution i has a kernel of widths[i] taps that starts at lag offsets[i]. Its state at time t is

        x[t] = A x[t-1] + B u[t - offset] - E u[t - offset - width]

    with A = e^{i w}, w = 2 pi m / periods[i], and E = A**width, which is 1 unless the kernel is cut. The output is
    Re sum C x + bias, summed over resolutions and modes, so the kernel is Re C A**s B at lag offset + s for s < width.

    A, B, E (N, M) and C (N, M, channels) are complex; bias (channels,) is real; all are in float64. C includes the
    branches' weights and BatchNorms. channels = heads * d_model / groups.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    E: Tensor
    bias: Tensor
    periods: tuple[int, ...]
    widths: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Number of lags up to the end of the longest kernel."""
        return max(offset + width for offset, width in zip(self.offsets, self.widths, strict=True))

    def phases(self, i: int, times: Tensor) -> Tensor:
        """Return cos and sin of w * times for the modes of resolution i, (2, M, T), at integer times (T,)."""
        m = torch.arange(self.A.shape[1], device=times.device)
        angle = 2 * math.pi / self.periods[i] * (m[:, None] * times % self.periods[i]).double()
        return torch.stack([angle.cos(), angle.sin()])

    def continued(self, i: int, start: int, length: int) -> Tensor:
        """Return Re C A**s B of resolution i for s = start, start + 1, ..., (length, channels).

        The kernel ends at its width; this formula continues it periodically past the end.
        """
        cos, sin = self.phases(i, torch.arange(start, start + length, device=self.C.device))
        return cos.t() @ self.C[i].real - sin.t() @ self.C[i].imag

    def kernel(self) -> Tensor:
        """Return the sum of all resolutions' kernels, (channels, reach)."""
        total = self.C.real.new_zeros(self.reach, self.C.shape[2])
        for i, (offset, width) in enumerate(zip(self.offsets, self.widths, strict=True)):
            total[offset : offset + width] += self.continued(i, 0, width)
        return total.t()


@dataclass(frozen=True)
class FourierSSM:
    """The truncated-Fourier model of the paper's appendix, dx/dtau = A x + B u, y = C x, one per resolution.

    tau counts windows. As the number of states S grows, C[i] e^{tau A} B at tau = s / periods[i] converges to
    resolution i's kernel at lag offsets[i] + s, and to 0 after tau = 1. At s = 0, where the window begins, it is twice
    the kernel. The appendix has neither offsets nor kernels that end before their window: here resolution i reads its
    input offsets[i] steps later and is cut at s = widths[i].

    A (S, S), B (S,), C (N, channels, S) and bias (channels,) are real.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    bias: Tensor
    periods: tuple[int, ...]
    widths: tuple[int, ...]
    offsets: tuple[int, ...]

    def kernel(self) -> Tensor:
        """Return the sum of all resolutions' kernels, (channels, reach), with the first tap of each halved."""
        ends = [offset + width for offset, width in zip(self.offsets, self.widths, strict=True)]
        total = self.C.new_zeros(max(ends), self.C.shape[1])
        for C, period, start, end in zip(self.C, self.periods, self.offsets, ends, strict=True):
            step, x = torch.linalg.matrix_exp(self.A / period), self.B
            total[start] += C @ x / 2
            for lag in range(start + 1, end):
                x = step @ x
                total[lag] += C @ x
        return total.t()


def sliding_ssm(branches: Branches, kernel: FourierKernel, rate: float) -> SlidingSSM:
    """Return the sliding form of a forward direction's Fourier kernels.

    Args:
        branches: the direction, with its weights and running statistics.
        kernel: `branches.kernel`, or the Fourier part of it.
        rate: sampling rate relative to training.
    """
    modes = kernel.modes.detach().double()  # (N, C, M, 2)
    scale, bias = branch_gains(branches, modes)
    reach = resampled(branches.l_max, rate)
    periods = [resampled(n, rate) for n in kernel.lengths]
    offsets = [round(rate * offset) for offset in branches.offsets]
    widths = [min(n, reach - offset) for n, offset in zip(periods, offsets, strict=True)]
    kept = [i for i, width in enumerate(widths) if width > 0]
    length, period, width = (
        torch.tensor([sizes[i] for i in kept], device=modes.device)[:, None]
        for sizes in (kernel.lengths, periods, widths)
    )
    m = torch.arange(modes.shape[2], device=modes.device)
    single = (m == 0) | (2 * m == period) | (2 * m == length)  # real modes, counted once by the inverse FFT
    weight = torch.where(single, 1.0, 2.0).masked_fill(2 * m > period, 0.0) * length.double().sqrt() / period
    real, imaginary = modes[kept].transpose(1, 2).unbind(-1)  # (N, M, C)
    C = torch.complex(real * weight[..., None], imaginary * weight.masked_fill(single, 0.0)[..., None])
    C = C * scale[kept][:, None]
    angles = (2 * math.pi / period.double() * steps for steps in (m, m * width % period))
    A, E = (torch.polar(torch.ones_like(angle), angle) for angle in angles)
    layout = (tuple(sizes[i] for i in kept) for sizes in (periods, widths, offsets))
    return SlidingSSM(A, torch.ones_like(A), C, E, bias, *layout)


def branch_gains(branches: Branches, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return each branch's gain (N, C), its weight times BatchNorm's scale, and the bias (C,) of their sum."""
    N, C = len(branches.offsets), branches.kernel.channels
    scale = like.new_ones(N, C) if branches.weights is None else branches.weights.detach().to(like)
    if branches.norm is None:
        return scale, like.new_zeros(C)
    gain, shift = (z.detach().to(like).view_as(scale) for z in running_affine(branches.norm))
    return scale * gain, (scale * shift).sum(0)


def fourier_ssm(sliding: SlidingSSM, states: int) -> FourierSSM:
    """Return the appendix's model of the same kernels, with an odd number of states.

    The states are x_n = integral over the last window of p_n u, with the basis p = 1, sqrt2 cos 2 pi tau,
    sqrt2 sin 2 pi tau, ... The model estimates the input that leaves the window from the states themselves. The
    frequency of the pair n = 2m - 1, 2m is 2 pi m; the appendix prints 2 pi n.
    """
    M = sliding.A.shape[1]
    if states % 2 == 0 or states < 2 * M - 1:
        raise ValueError(f"states must be an odd number of at least {2 * M - 1} for {M} modes; got {states}")
    ends = sliding.C.real.new_zeros(states)  # p_n at the window's ends
    ends[0], ends[1::2] = 1.0, math.sqrt(2)
    frequency = torch.zeros(states - 1, device=ends.device, dtype=ends.dtype)
    frequency[1::2] = 2 * math.pi * torch.arange(1, states // 2 + 1, device=ends.device)
    A = torch.diag(frequency, -1) - torch.diag(frequency, 1) - 2 * torch.outer(ends, ends)
    C = sliding.C.real.new_zeros(len(sliding.periods), sliding.C.shape[2], states)
    modes = sliding.C.transpose(1, 2)  # (N, channels, M)
    C[:, :, 0] = modes.real[:, :, 0]
    C[:, :, 1 : 2 * M - 1 : 2] = modes.real[:, :, 1:] / math.sqrt(2)
    C[:, :, 2 : 2 * M - 1 : 2] = -modes.imag[:, :, 1:] / math.sqrt(2)
    return FourierSSM(A, 2 * ends, C, sliding.bias, sliding.periods, sliding.widths, sliding.offsets)
