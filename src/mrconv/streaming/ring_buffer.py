"""The last inputs in a ring buffer, and kernels of a few taps that read it."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_GATHERED = 2**22  # elements that taps read at a time


class RingBuffer:
    """A view of the last R inputs, (B, R, D), in which the input of time t is at t % R."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.size = inputs, inputs.shape[1]

    def write(self, time: int, x: Tensor) -> None:
        """Store x (B, T, D), the inputs from `time` on; only the last R of them are kept."""
        if x.shape[1] == 1:
            self.inputs[:, time % self.size] = x[:, 0]
            return
        skipped = max(0, x.shape[1] - self.size)
        start, x = (time + skipped) % self.size, x[:, skipped:]
        first = min(x.shape[1], self.size - start)
        self.inputs[:, start : start + first] = x[:, :first]
        self.inputs[:, : x.shape[1] - first] = x[:, first:]

    def read(self, time: int, length: int) -> Tensor:
        """Return the inputs (B, length, D) from `time` on."""
        start = time % self.size
        if start + length <= self.size:
            return self.inputs[:, start : start + length]
        return torch.cat([self.inputs[:, start:], self.inputs[:, : start + length - self.size]], 1)


class TapConvolution:
    """Convolution with kernels of a few taps, values (H * M, taps) at `lags`, read from a ring buffer.

    The D = G * M input channels form G groups of M. All groups share the H * M kernels: one per head and channel.
    """

    def __init__(self, values: Tensor, lags: tuple[int, ...], heads: int) -> None:
        self.values = values.t().reshape(1, len(lags), 1, heads, -1)  # (1, taps, 1, H, M)
        self.lags = torch.tensor(lags, device=values.device)

    def outputs(self, ring: RingBuffer, time: int, length: int, groups: int) -> Tensor:
        """Return the outputs (B, length, G, H, M) from `time` on; the ring must hold the inputs up to there."""
        B, _, D = ring.inputs.shape
        chunk = max(1, MAX_GATHERED // (B * D * len(self.lags)))
        outputs = []
        for start in range(time, time + length, chunk):
            times = torch.arange(start, min(start + chunk, time + length), device=ring.inputs.device)
            x = ring.inputs[:, (times[:, None] - self.lags) % ring.size].to(self.values.dtype)  # (B, T, taps, D)
            outputs.append((x.reshape(*x.shape[:3], groups, 1, -1) * self.values).sum(2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
