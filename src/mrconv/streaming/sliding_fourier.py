"""Online convolution with Fourier kernels: one sum over a sliding window per resolution and mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fft import irfft, rfft

from ..ops import fast_length
from .ring_buffer import RingBuffer
from .state_space import SlidingSSM

MAX_SUMMED = 2**14  # inputs that one matrix product sums


class SlidingFourier:
    """Convolution with Fourier kernels in their sliding form (`SlidingSSM`).

    The poles lie on the unit circle, so rounding errors of a single sum would accumulate. Each resolution therefore has
    a second sum, which starts from zero whenever the time is a multiple of the window's width. One window later it
    equals the window's sum and replaces the first.
    """

    def __init__(self, ssm: SlidingSSM, heads: int) -> None:
        self.ssm = ssm
        self.pole, self.leaving = ssm.A[..., None], ssm.E[..., None]  # (N, M, 1)
        self.constant = ssm.A.shape[1] == 1  # the only mode has frequency 0: everything is real
        self.weights = (ssm.C.real if self.constant else ssm.C).unflatten(2, (1, heads, -1))  # (N, M, 1, H, channels)
        self.cut = not self.constant and any(width % n for width, n in zip(ssm.widths, ssm.periods, strict=True))
        starts = torch.tensor(ssm.offsets, device=ssm.C.device)
        self.ends = starts + torch.tensor(ssm.widths, device=ssm.C.device)
        self.starts = starts if any(ssm.offsets) else None

    def step(self, modes: Tensor, ring: RingBuffer, time: int, groups: int) -> Tensor:
        """Advance by one step, whose input the ring already holds; return the output (B, 1, G, H, channels)."""
        s = modes[..., 0] if self.constant else torch.view_as_complex(modes).mul_(self.pole)  # (B, 2, N, M, D)
        if self.starts is None:
            s.add_(ring.inputs[:, time % ring.size, None, None, None])
        else:
            s.add_(ring.inputs[:, (time - self.starts) % ring.size][:, None, :, None])
        old = ring.inputs[:, (time - self.ends) % ring.size].unsqueeze(2)  # (B, N, 1, D)
        current, restarted = s.unbind(1)
        current.sub_(self.leaving * old if self.cut else old)
        for start, stop in self._complete(time + 1):
            current[:, start:stop].copy_(restarted[:, start:stop])
            restarted[:, start:stop].zero_()
        current = current.unflatten(3, (groups, 1, -1))  # (B, N, M, G, 1, channels)
        y = (current * self.weights).sum((1, 2))
        return (y if self.constant else y.real)[:, None]

    def _complete(self, time: int) -> list[tuple[int, int]]:
        """Return the runs of resolutions whose second sum covers a whole window at this time."""
        runs: list[tuple[int, int]] = []
        for i, width in enumerate(self.ssm.widths):
            if time % width == 0:
                runs = [*runs[:-1], (runs[-1][0], i + 1)] if runs and runs[-1][1] == i else [*runs, (i, i + 1)]
        return runs

    def outputs(self, modes: Tensor, ring: RingBuffer, time: int, length: int, groups: int) -> Tensor:
        """Return the outputs (B, length, G, H, channels) from `time` on, without advancing.

        They are the current sums, rotated, plus the inputs that enter the windows, minus those that leave them, both
        convolved with the kernel continued past its end.
        """
        ssm, heads = self.ssm, self.weights.shape[3]
        kernels: dict[int, Tensor] = {}
        after = torch.arange(1, length + 1, device=modes.device)
        total = modes.new_zeros(1)
        for i, (offset, width) in enumerate(zip(ssm.offsets, ssm.widths, strict=True)):
            for lag, sign, start in ((offset, 1, 0), (offset + width, -1, width)):
                kernels[lag] = kernels.get(lag, 0) + sign * ssm.continued(i, start, length)
            cos, sin = ssm.phases(i, after)
            s = torch.view_as_complex(modes[:, 0, i]).unflatten(2, (groups, 1, -1)) * self.weights[i]
            total = total + torch.einsum("bmghc,mt->btghc", s.real, cos) - torch.einsum("bmghc,mt->btghc", s.imag, sin)
        n = fast_length(2 * length)
        spectrum = sum(
            rfft(ring.read(time - lag, length).double().unflatten(2, (groups, 1, -1)), n, dim=1)
            * rfft(kernel.unflatten(1, (heads, -1)), n, dim=0)[:, None]
            for lag, kernel in kernels.items()
        )
        return total + irfft(spectrum, n, dim=1)[:, :length]

    def advance(self, modes: Tensor, ring: RingBuffer, time: int, length: int, recompute: bool) -> None:
        """Advance by `length` inputs that the ring already holds; with `recompute`, sum every window again."""
        end = time + length
        for i, (offset, width) in enumerate(zip(self.ssm.offsets, self.ssm.widths, strict=True)):
            since, entered = end % width, end - offset  # steps since the second sum started; inputs seen
            if recompute or length >= width:
                first, second = self._sum(ring, i, entered, width), self._sum(ring, i, entered, since)
            else:
                replaced = since < length
                rotation = torch.complex(*self.ssm.phases(i, torch.tensor([length], device=modes.device)))  # (M, 1)
                first, second = (rotation * s for s in torch.view_as_complex(modes[:, :, i]).unbind(1))
                new, count = self._sum(ring, i, entered, length), since if replaced else length
                left = self.leaving[i] * self._sum(ring, i, entered - width, count)
                first = (second if replaced else first) + new - left
                second = self._sum(ring, i, entered, since) if replaced else second + new
            modes[:, :, i] = torch.view_as_real(torch.stack([first, second], 1))

    def _sum(self, ring: RingBuffer, i: int, end: int, length: int) -> Tensor:
        """Return the sums (B, M, D) of resolution i over the `length` inputs before time `end`."""
        B, _, D = ring.inputs.shape
        total = self.pole.new_zeros(B, self.pole.shape[1], D)
        for start in range(end - length, end, MAX_SUMMED):
            x = ring.read(start, min(MAX_SUMMED, end - start)).double()
            cos, sin = self.ssm.phases(i, torch.arange(x.shape[1], -1, -1, device=x.device))
            rotation = torch.complex(cos[:, :1], sin[:, :1])
            total = rotation * total + torch.complex(cos[:, 1:] @ x, sin[:, 1:] @ x)
        return total
