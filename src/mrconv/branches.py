"""The N branches of one direction: kernels of doubling length, their weights and their BatchNorm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .kernels import kernel_class, resampled
from .norm import affine, mean_and_variance, running_affine, track
from .ops import Lags, Taps, compute_dtype, moments
from .reference import branch_sum


def resolution_lengths(l_max: int, kernel_size: int, combine: str) -> list[int]:
    """Kernel length l_i of each of the N = ceil(log2(l_max / l0)) + 1 resolutions."""
    N = math.ceil(math.log2(l_max / kernel_size)) + 1
    return [kernel_size << (max(0, i - 1) if combine == "concat" else i) for i in range(N)]


class Branches(nn.Module):
    """One direction's kernels k_i, each with a weight per channel: learned (alpha), fixed (decay), or 1.

    With `combine="sum"` all kernels start at lag 0; with "concat" each starts where the one before ends. What
    reaches past l_max is cut. The backward direction (`anticausal`) runs on reversed time, one step late.
    """

    decay: Tensor | None

    def __init__(
        self,
        channels: int,
        l_max: int,
        kernel_size: int,
        *,
        kernel: str,
        combine: str,
        norm: str,
        decay: tuple[float, float] | None,
        eps: float,
        momentum: float | None,
        sync_stats: bool,
        anticausal: bool,
        seed: int,
        **factory: Any,
    ) -> None:
        super().__init__()
        lengths = resolution_lengths(l_max, kernel_size, combine)
        N = len(lengths)
        self.l_max, self.anticausal, self.sync_stats, self.decay_range = l_max, anticausal, sync_stats, decay
        self.offsets = [sum(lengths[:i]) if combine == "concat" else 0 for i in range(N)]
        self.kernel = kernel_class(kernel)(channels, lengths, kernel_size, seed=seed, **factory)
        several = N > 1
        learned = several and norm != "none" and decay is None
        self.alpha = nn.Parameter(torch.empty(N, channels, **factory)) if learned else None
        fixed = torch.empty(N, channels, **factory) if several and decay is not None else None
        self.register_buffer("decay", fixed)
        normed = several and norm == "batch"
        self.norm = nn.BatchNorm1d(N * channels, eps, momentum, **factory) if normed else None
        self._reset_weights()

    def reset_parameters(self) -> None:
        """Draw fresh kernels; equal weights; forget the statistics."""
        self.kernel.reset_parameters()
        if self.norm is not None:
            self.norm.reset_parameters()
        self._reset_weights()

    @torch.no_grad()
    def _reset_weights(self) -> None:
        N = len(self.offsets)
        if self.alpha is not None:
            nn.init.constant_(self.alpha, N**-0.5)
        if self.decay is not None and self.decay_range is not None:
            base = torch.linspace(*self.decay_range, self.decay.shape[1], dtype=torch.float64, device="cpu")
            powers = base ** torch.arange(N - 1, -1, -1, device="cpu")[:, None]
            self.decay.copy_(powers / powers.square().sum(0).sqrt())

    def kernels(self, rate: float = 1.0) -> list[Taps]:
        """Return each branch's kernel in its place: values (C, T) and positions from 0 on, cut at l_max."""
        delay = 1 / rate - 1 if self.anticausal else 0.0  # tap 0 of the backward kernel acts on t + 1
        reach = resampled(self.l_max, rate)
        placed: list[Taps] = []
        for i, values in enumerate(self.kernel(rate, delay)):
            values = values.to(compute_dtype(values))
            start = round(rate * self.offsets[i])
            if self.kernel.positions is None:
                values = values[:, : reach - start]
                placed.append((values, range(start, start + values.shape[1])))
            else:
                positions = [start + p for p in self.kernel.positions[i]]
                keep = [j for j, p in enumerate(positions) if p < reach]
                if len(keep) < len(positions):
                    values = values[:, keep]
                placed.append((values, tuple(positions[j] for j in keep)))
        return placed

    def weighted(
        self, rate: float = 1.0, x: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[list[Taps], Tensor | None]:
        """Return the kernels, weighted and normalised, at lags in the input's time, and their bias (C,).

        The statistics are those of x (B, C, L), zero from `lengths` on, or the running ones if x is None.
        """
        kernels = self.kernels(rate)
        scale, bias = self.alpha if self.decay is None else self.decay, None
        if self.norm is not None and self.alpha is not None:
            affines = running_affine(self.norm) if x is None else self._batch_affine(self.norm, kernels, x, lengths)
            gain, shift = (z.view_as(self.alpha) for z in affines)
            scale, bias = self.alpha * gain, (self.alpha * shift).sum(0)
        if scale is not None:
            kernels = [(s[:, None] * values, lags) for s, (values, lags) in zip(scale, kernels, strict=True)]
        return [(values, _mirrored(lags) if self.anticausal else lags) for values, lags in kernels], bias

    def _batch_affine(
        self, norm: nn.BatchNorm1d, kernels: list[Taps], x: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if x.shape[0] * x.shape[2] == 1:
            raise ValueError("norm='batch' in training needs more than 1 value per channel; got batch 1 and length 1")
        count = x.shape[0] * x.shape[2] if lengths is None else lengths.sum()
        if self.anticausal:
            x = x.flip(-1)
        elif lengths is not None:
            x = _right_aligned(x, lengths)
        sums = moments(x, self._delayed(kernels)).flatten(1)
        mean, var, total = mean_and_variance(sums, count, self.sync_stats)
        track(norm, mean, var, total)
        return affine(norm, mean, var)

    def reference(self, x: Tensor, mask: Tensor | None, rate: float) -> Tensor:
        """Return this direction's output by the paper's algorithm, with x (B, C, L) zero where mask is."""
        if self.anticausal:
            x, mask = x.flip(-1), None if mask is None else mask.flip(-1)
        kernels = self._delayed(self.kernels(rate))
        y = branch_sum(x, kernels, self.alpha if self.decay is None else self.decay, self.norm, mask)
        return y.flip(-1) if self.anticausal else y

    def _delayed(self, kernels: list[Taps]) -> list[Taps]:
        late = int(self.anticausal)
        return [(values, _shifted(lags, late)) for values, lags in kernels]


def _shifted(lags: Lags, by: int) -> Lags:
    if isinstance(lags, range):
        return range(lags.start + by, lags.stop + by)
    return tuple(lag + by for lag in lags)


def _mirrored(lags: Lags) -> Lags:
    if isinstance(lags, range):
        return range(-1 - lags.start, -1 - lags.stop, -1)
    return tuple(-1 - lag for lag in lags)


def _right_aligned(x: Tensor, lengths: Tensor) -> Tensor:
    """Move each sequence to the end: what a causal branch puts past it then falls outside."""
    L = x.shape[-1]
    index = (torch.arange(L, device=x.device) + lengths[:, None]) % L
    return x.gather(-1, index[:, None].expand_as(x))
