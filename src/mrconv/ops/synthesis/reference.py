"""References of `synthesize` and `synthesize_with_taps`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def synthesize_reference(modes: Tensor, lengths: Sequence[int], scales: Sequence[float]) -> list[Tensor]:
    """Compute `synthesize` as plain sums of cosines and sines."""
    return [scale * _sum_of_modes(branch, n) for branch, n, scale in zip(modes, lengths, scales, strict=True)]


def synthesize_with_taps_reference(
    modes: Tensor, taps: Tensor, index: Tensor, weights: Tensor, lengths: Sequence[int], scales: Sequence[float]
) -> list[Tensor]:
    """Compute `synthesize_with_taps` resolution by resolution."""
    smooth = synthesize_reference(modes, lengths, scales)
    branches = zip(smooth, taps, index, *weights, strict=True)
    return [(a[:, None] * k).index_add(1, at, b[:, None] * values) for k, values, at, a, b in branches]


def _sum_of_modes(modes: Tensor, n: int) -> Tensor:
    m = torch.arange(min(modes.shape[-2], n // 2 + 1), device=modes.device, dtype=modes.dtype)
    angle = 2 * torch.pi / n * m[:, None] * torch.arange(n, device=modes.device, dtype=modes.dtype)
    single = (m == 0) | (2 * m == n)
    real, imaginary = (modes[..., : len(m), :] * torch.where(single, 1.0, 2.0)[:, None] / n).unbind(-1)
    return real @ angle.cos() - imaginary.masked_fill(single, 0.0) @ angle.sin()
