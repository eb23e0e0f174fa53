"""Online convolution with dense kernels by tiles of doubling size (relaxed convolution)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fft import irfft, rfft

BLOCK = 32  # steps between two tiles; shorter lags are summed directly


class TiledConvolution:
    """Convolution with dense kernels (H * M, K): each block of inputs acts on the next block of outputs by one FFT.

    After n steps, let U be the largest power of two that divides n. Inputs n - U .. n - 1 then act on outputs
    n .. n + U - 1. Together with the direct sums inside blocks of BLOCK steps, this covers every pair of input and
    output exactly once.
    """

    def __init__(self, kernel: Tensor, heads: int) -> None:
        self.kernel = kernel.t().reshape(kernel.shape[1], heads, -1)  # (K, H, M)
        self.reach = kernel.shape[1]
        self.size = max(BLOCK, 1 << (self.reach - 1).bit_length())
        times = torch.arange(BLOCK, device=kernel.device)
        lags = times[:, None] - times
        near = self.kernel[lags.clamp(0, self.reach - 1)]
        self.near = near.masked_fill(((lags < 0) | (lags >= self.reach))[..., None, None], 0)  # (output, input, H, M)
        self.spectra: dict[tuple[int, int], Tensor] = {}

    def outputs(self, inputs: Tensor, future: Tensor, time: int, u: Tensor, groups: int) -> Tensor:
        """Process inputs u (B, T, D) from `time` on; return their outputs (B, T, G, H, M).

        `inputs` and `future` are those of a `LayerState`, updated in place.
        """
        outputs, done = [], 0
        future = future.unflatten(2, (groups, self.kernel.shape[1], -1))
        while done < u.shape[1]:
            left, begun, start = u.shape[1] - done, time % BLOCK, time % self.size
            aligned = begun == 0 and left >= BLOCK
            n = self._aligned_block(time, left) if aligned else min(left, BLOCK - begun)
            inputs[:, start : start + n] = u[:, done : done + n]
            y = future[:, start : start + n].clone()
            future[:, start : start + n] = 0
            x = inputs[:, start if aligned else start - begun : start + n].to(y.dtype).unflatten(2, (groups, 1, -1))
            y += self._fft_conv(x, n, n)[:, :n] if aligned else self._direct(x, begun)
            outputs.append(y)
            time, done = time + n, done + n
            if time % BLOCK == 0:
                self._add_tile(inputs, future, time)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _aligned_block(self, time: int, left: int) -> int:
        """Return the size of the largest aligned block of inputs that starts at `time`."""
        largest = 1 << (left.bit_length() - 1)
        return min(largest, self.size, time & -time or self.size)

    def _direct(self, x: Tensor, begun: int) -> Tensor:
        """Return the outputs from index `begun` on for the inputs x of the current block."""
        if x.shape[1] == begun + 1:
            return (x * self.near[begun, : begun + 1, None]).sum(1, keepdim=True)
        near = self.near[begun : x.shape[1], : x.shape[1]]
        return torch.einsum("bqgm,rqhm->brghm", x[:, :, :, 0], near)

    def _add_tile(self, inputs: Tensor, future: Tensor, time: int) -> None:
        """Add the contribution of the last block of inputs to the next block of outputs."""
        U = min(time & -time, self.size)
        past, start = (time - U) % self.size, time % self.size
        x = inputs[:, past : past + U].to(future.dtype).unflatten(2, (future.shape[2], 1, -1))
        future[:, start : start + U] += self._fft_conv(x, U, 2 * U)[:, U:]

    def _fft_conv(self, x: Tensor, U: int, taps: int) -> Tensor:
        """Convolve x (B, U, G, 1, M) with the first taps of the kernel, by FFTs of length 2 U."""
        if (U, taps) not in self.spectra:
            self.spectra[U, taps] = rfft(self.kernel[:taps], 2 * U, dim=0)[:, None]
        return irfft(rfft(x, 2 * U, dim=1) * self.spectra[U, taps], 2 * U, dim=1)
