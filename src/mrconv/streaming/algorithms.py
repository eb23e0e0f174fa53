"""Online convolution: inputs come one by one or in chunks, and each output is due at once. Three ways, by the kernel.

A kernel that is a few taps reads them from a ring of the last inputs (`Tapped`). Fourier kernels keep, per resolution
and mode, a sum over the window that slides (`Sliding`). Other kernels run as tiles (`Tiled`): whenever a block of
inputs is complete, its part of the next, equally long block of outputs is added by one FFT.

Channels are split into G groups; the kernels, one per head H and channel M of a group, are the same for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fft import irfft, rfft

from ..ops import fast_length
from .state_space import SlidingSSM

BASE = 32  # steps between two tiles: what is nearer is added up directly
GATHERED = 2**22  # elements that taps read at a time
SUMMED = 2**14  # inputs that are summed up at a time


class Ring:
    """The last inputs: that of time t at t % R."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.size = inputs, inputs.shape[1]

    def write(self, time: int, x: Tensor) -> None:
        """Keep x (B, T, D), the inputs from `time` on, or the last of them."""
        if x.shape[1] == 1:
            self.inputs[:, time % self.size] = x[:, 0]
            return
        skipped = max(0, x.shape[1] - self.size)
        at, x = (time + skipped) % self.size, x[:, skipped:]
        first = min(x.shape[1], self.size - at)
        self.inputs[:, at : at + first] = x[:, :first]
        self.inputs[:, : x.shape[1] - first] = x[:, first:]

    def read(self, time: int, length: int) -> Tensor:
        """Return the inputs (B, length, D) from `time` on."""
        at = time % self.size
        if at + length <= self.size:
            return self.inputs[:, at : at + length]
        return torch.cat([self.inputs[:, at:], self.inputs[:, : at + length - self.size]], 1)


class Tapped:
    """Kernels of a few taps, read from the ring."""

    def __init__(self, values: Tensor, lags: tuple[int, ...], heads: int) -> None:
        self.values = values.t().reshape(1, len(lags), 1, heads, -1)  # (1, taps, 1, H, M)
        self.lags = torch.tensor(lags, device=values.device)

    def outputs(self, ring: Ring, time: int, length: int, groups: int) -> Tensor:
        """Return (B, length, G, H, M) from `time` on; the ring has the inputs up to there."""
        B, _, D = ring.inputs.shape
        some = max(1, GATHERED // (B * D * len(self.lags)))
        parts = []
        for start in range(time, time + length, some):
            times = torch.arange(start, min(start + some, time + length), device=ring.inputs.device)
            x = ring.inputs[:, (times[:, None] - self.lags) % ring.size].to(self.values.dtype)  # (B, T, taps, D)
            parts.append((x.reshape(*x.shape[:3], groups, 1, -1) * self.values).sum(2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Sliding:
    """Fourier kernels, as sums over windows that slide.

    Rounding would walk, since no pole decays. So each resolution has a second sum, which starts from nothing whenever
    the clock is a multiple of the window: one window later it is that window's sum, and takes the place of the first.
    """

    def __init__(self, ssm: SlidingSSM, heads: int) -> None:
        self.ssm = ssm
        self.turn, self.leave = ssm.A[..., None], ssm.E[..., None]  # (N, M, 1)
        self.weights = ssm.C.unflatten(2, (1, heads, -1))  # (N, M, 1, H, channels)
        starts = torch.tensor(ssm.offsets, device=ssm.C.device)
        self.ends = starts + torch.tensor(ssm.widths, device=ssm.C.device)
        self.starts = starts if any(ssm.offsets) else None

    def step(self, modes: Tensor, ring: Ring, time: int, groups: int) -> Tensor:
        """Move on by one step; return its output (B, 1, G, H, M)."""
        s = torch.view_as_complex(modes)  # (B, 2, N, M, D)
        if self.starts is None:
            new = ring.inputs[:, None, None, None, time % ring.size]
        else:
            new = ring.inputs[:, (time - self.starts) % ring.size][:, None, :, None]
        old = ring.inputs[:, (time - self.ends) % ring.size][:, :, None]  # (B, N, 1, D)
        s.mul_(self.turn).add_(new)
        s[:, 0].sub_(self.leave * old)
        for i, width in enumerate(self.ssm.widths):
            if (time + 1) % width == 0:
                s[:, 0, i] = s[:, 1, i]
                s[:, 1, i] = 0
        now = s[:, 0].unflatten(3, (groups, 1, -1))  # (B, N, M, G, 1, channels)
        return (now * self.weights).sum((1, 2)).real[:, None]

    def outputs(self, modes: Tensor, ring: Ring, time: int, length: int, groups: int) -> Tensor:
        """Return the outputs (B, length, G, H, M) from `time` on, without moving on.

        They are the present sums, turned, plus the inputs that enter the windows, minus those that leave them: each
        through the kernel, continued past its end.
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

    def advance(self, modes: Tensor, ring: Ring, time: int, length: int, anew: bool) -> None:
        """Move on by `length` inputs that the ring already has; if `anew`, from nothing but the ring."""
        end = time + length
        for i, (offset, width) in enumerate(zip(self.ssm.offsets, self.ssm.widths, strict=True)):
            since, entered = end % width, end - offset  # steps since the second sum was begun; inputs seen
            if anew or length >= width:
                first, second = self._sum(ring, i, entered, width), self._sum(ring, i, entered, since)
            else:
                swaps = since < length
                turn = torch.complex(*self.ssm.phases(i, torch.tensor([length], device=modes.device)))  # (M, 1)
                first, second = (turn * s for s in torch.view_as_complex(modes[:, :, i]).unbind(1))
                new, leaving = self._sum(ring, i, entered, length), since if swaps else length
                left = self.leave[i] * self._sum(ring, i, entered - width, leaving)
                first = (second if swaps else first) + new - left
                second = self._sum(ring, i, entered, since) if swaps else second + new
            modes[:, :, i] = torch.view_as_real(torch.stack([first, second], 1))

    def _sum(self, ring: Ring, i: int, end: int, length: int) -> Tensor:
        """Return the sums (B, M, D) of resolution i over the `length` inputs before time `end`."""
        B, _, D = ring.inputs.shape
        total = self.turn.new_zeros(B, self.turn.shape[1], D)
        for start in range(end - length, end, SUMMED):
            x = ring.read(start, min(SUMMED, end - start)).double()
            cos, sin = self.ssm.phases(i, torch.arange(x.shape[1], -1, -1, device=x.device))
            turn = torch.complex(cos[:, :1], sin[:, :1])
            total = turn * total + torch.complex(cos[:, 1:] @ x, sin[:, 1:] @ x)
        return total


class Tiled:
    """Dense kernels: inputs and outputs in aligned blocks, each pair of neighbours one FFT.

    After n steps, U the largest power of two that divides n, inputs n - U .. n - 1 act on outputs n .. n + U - 1:
    together with what is inside of blocks of BASE, every pair of input and output is covered once.
    """

    def __init__(self, kernel: Tensor, heads: int) -> None:
        self.kernel = kernel.t().reshape(kernel.shape[1], heads, -1)  # (K, H, M)
        self.reach = kernel.shape[1]
        self.size = max(BASE, 1 << (self.reach - 1).bit_length())
        rows = torch.arange(BASE, device=kernel.device)
        lags = rows[:, None] - rows
        near = self.kernel[lags.clamp(0, self.reach - 1)]
        self.near = near.masked_fill(((lags < 0) | (lags >= self.reach))[..., None, None], 0)  # (output, input, H, M)
        self.spectra: dict[tuple[int, int], Tensor] = {}

    def outputs(self, inputs: Tensor, future: Tensor, time: int, u: Tensor, groups: int) -> Tensor:
        """Take inputs u (B, T, D); return their outputs (B, T, G, H, M)."""
        parts, taken = [], 0
        future = future.unflatten(2, (groups, self.kernel.shape[1], -1))
        while taken < u.shape[1]:
            left, begun, at = u.shape[1] - taken, time % BASE, time % self.size
            aligned = begun == 0 and left >= BASE
            n = self._block(time, left) if aligned else min(left, BASE - begun)
            inputs[:, at : at + n] = u[:, taken : taken + n]
            y = future[:, at : at + n].clone()
            future[:, at : at + n] = 0
            x = inputs[:, at if aligned else at - begun : at + n].to(y.dtype).unflatten(2, (groups, 1, -1))
            y += self._by_fft(x, n, n)[:, :n] if aligned else self._near(x, begun)
            parts.append(y)
            time, taken = time + n, taken + n
            if time % BASE == 0:
                self._tile(inputs, future, time)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _block(self, time: int, left: int) -> int:
        """Return the largest aligned block of inputs that begins here."""
        largest = 1 << (left.bit_length() - 1)
        return min(largest, self.size, time & -time or self.size)

    def _near(self, x: Tensor, begun: int) -> Tensor:
        """Return the outputs from `begun` on of the inputs of a block of BASE."""
        if x.shape[1] == begun + 1:
            return (x * self.near[begun, : begun + 1, None]).sum(1, keepdim=True)
        near = self.near[begun : x.shape[1], : x.shape[1]]
        return torch.einsum("bqgm,rqhm->brghm", x[:, :, :, 0], near)

    def _tile(self, inputs: Tensor, future: Tensor, time: int) -> None:
        """Add what the last block of inputs does to the next block of outputs."""
        U = min(time & -time, self.size)
        start, at = (time - U) % self.size, time % self.size
        x = inputs[:, start : start + U].to(future.dtype).unflatten(2, (future.shape[2], 1, -1))
        future[:, at : at + U] += self._by_fft(x, U, 2 * U)[:, U:]

    def _by_fft(self, x: Tensor, U: int, taps: int) -> Tensor:
        """Convolve x (B, U, G, 1, M) with the first taps, by FFTs of length 2 U."""
        if (U, taps) not in self.spectra:
            self.spectra[U, taps] = rfft(self.kernel[:taps], 2 * U, dim=0)[:, None]
        return irfft(rfft(x, 2 * U, dim=1) * self.spectra[U, taps], 2 * U, dim=1)
