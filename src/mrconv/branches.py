"""The N branches of one direction: kernels of doubling length, their weights and their BatchNorm."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .config import LayerOptions
from .kernels import FourierKernel, kernel_class, resampled
from .norm import running_affine
from .ops import BranchShape, ConstantKernels, Lags, ModeKernels, Taps, compute_dtype
from .reference import branch_sum

RANK_ADVANTAGE = 8
"""A merged layer keeps modes if a dense kernel has at least this many times as many numbers."""


INITIAL_SCALE = 1 / 8
"""Factor of initial kernel parameters before a BatchNorm.

The output does not depend on it, and Adam's steps do not either: smaller kernels turn faster at the same learning rate.
"""


def resolution_lengths(l_max: int, kernel_size: int, combine: str) -> list[int]:
    """Return the kernel length l_i of each of the N = ceil(log2(l_max / l0)) + 1 resolutions."""
    N = math.ceil(math.log2(l_max / kernel_size)) + 1
    return [kernel_size << (max(0, i - 1) if combine == "concat" else i) for i in range(N)]


class MergedKernel(NamedTuple):
    """One kernel for all branches, values (C, T) at lags (T), and its bias (C,)."""

    values: Tensor
    lags: Lags
    bias: Tensor


class Branches(nn.Module):
    """One direction's kernels k_i, each with a weight per channel: learned (alpha), fixed (decay), or 1.

    With `combine="sum"` all kernels start at lag 0; with "concat" each starts where the previous one ends. Kernels are
    cut at l_max. The backward direction (`anticausal`) starts at lag -1, the next position.
    """

    decay: Tensor | None

    def __init__(
        self,
        channels: int,
        l_max: int,
        options: LayerOptions,
        *,
        anticausal: bool,
        seed: int,
        **factory: Any,
    ) -> None:
        super().__init__()
        lengths = resolution_lengths(l_max, options.kernel_size, options.combine)
        N = len(lengths)
        self.l_max, self.anticausal, self.decay_range = l_max, anticausal, options.decay
        self.offsets = [sum(lengths[:i]) if options.combine == "concat" else 0 for i in range(N)]
        self.kernel = kernel_class(options.kernel)(channels, lengths, options.kernel_size, seed=seed, **factory)
        self._shapes: dict[float, tuple[Any, list[BranchShape]]] = {}  # of the last rate
        several = N > 1
        learned = several and options.norm != "none" and options.decay is None
        self.alpha = nn.Parameter(torch.empty(N, channels, **factory)) if learned else None
        fixed = torch.empty(N, channels, **factory) if several and options.decay is not None else None
        self.register_buffer("decay", fixed)
        normed = several and options.norm == "batch"
        self.norm = nn.BatchNorm1d(N * channels, options.eps, options.momentum, **factory) if normed else None
        self._scale_kernels()
        self._reset_weights()

    def reset_parameters(self) -> None:
        """Draw new kernels; reset the weights and the statistics."""
        self.kernel.reset_parameters()
        self._scale_kernels()
        if self.norm is not None:
            self.norm.reset_parameters()
        self._reset_weights()

    @torch.no_grad()
    def _scale_kernels(self) -> None:
        if self.norm is not None:
            torch._foreach_mul_(list(self.kernel.parameters()), INITIAL_SCALE)

    @torch.no_grad()
    def _reset_weights(self) -> None:
        N = len(self.offsets)
        if self.alpha is not None:
            nn.init.constant_(self.alpha, N**-0.5)
        if self.decay is not None and self.decay_range is not None and not self.decay.is_meta:
            low, high = self.decay_range
            base = torch.linspace(low, high, self.decay.shape[1], dtype=torch.float64, device="cpu")
            powers = base ** torch.arange(N - 1, -1, -1, device="cpu")[:, None]
            self.decay.copy_(powers / powers.square().sum(0).sqrt())

    def shapes(self, rate: float = 1.0) -> list[BranchShape]:
        """Return the lags of each branch's kernel, cut at l_max, with the number of its values and of its modes.

        In the backward direction lags are negative; those of a dense kernel descend from -1.
        """
        positions = self.kernel.positions
        if torch.compiler.is_compiling():
            return self._find_shapes(rate, positions)
        if rate not in self._shapes or self._shapes[rate][0] != positions:
            self._shapes = {rate: (positions, self._find_shapes(rate, positions))}
        return self._shapes[rate][1]

    def _find_shapes(self, rate: float, positions: tuple[tuple[int, ...], ...] | None) -> list[BranchShape]:
        reach = resampled(self.l_max, rate)
        modes = 0 if rate != 1 or self.anticausal or any(self.offsets) else self.kernel.moving_modes
        shapes = []
        for i, length in enumerate(self.kernel.lengths):
            start = round(rate * self.offsets[i])
            if positions is None:
                lags: Lags = range(start, start + min(resampled(length, rate), reach - start))
            else:
                lags = tuple(start + p for p in positions[i] if start + p < reach)
            lags = _mirrored(lags) if self.anticausal else lags
            shapes.append(BranchShape(lags, 1 if self.kernel.constant else len(lags), modes))
        return shapes

    def kernels(self, rate: float = 1.0) -> list[Taps]:
        """Return the kernel of each branch, values (C, T) at the lags of `shapes`."""
        delay = 1 / rate - 1 if self.anticausal else 0.0  # tap 0 of the backward kernel acts on t + 1
        kernels = self.kernel(rate, delay)
        self._check(kernels, rate)
        reach, positions = resampled(self.l_max, rate), self.kernel.positions
        placed = []
        for i, (values, (lags, _, _)) in enumerate(zip(kernels, self.shapes(rate), strict=True)):
            if values.shape[1] > len(lags):
                start = round(rate * self.offsets[i])
                inside = [j for j, p in enumerate(positions[i]) if start + p < reach] if positions else None
                values = values[:, : len(lags)] if inside is None else values[:, inside]
            placed.append(Taps(values.to(compute_dtype(values)), lags))
        return placed

    def _check(self, kernels: list[Tensor], rate: float) -> None:
        """Raise ValueError if the kernel class returned tensors of unexpected shapes."""
        C, positions = self.kernel.channels, self.kernel.positions
        if self.kernel.constant:
            sizes = [1 for _ in self.kernel.lengths]
        elif positions is not None:
            sizes = [len(taps) for taps in positions]
        else:
            sizes = [resampled(length, rate) for length in self.kernel.lengths]
        if [kernel.shape for kernel in kernels] != [(C, size) for size in sizes]:
            raise ValueError(
                f"{type(self.kernel).__name__} must return kernels of {C} channels and {sizes} taps; "
                f"got shapes {[tuple(kernel.shape) for kernel in kernels]}"
            )

    def mode_kernels(self) -> ModeKernels:
        """Return the kernels as Fourier modes; only valid if `shapes` reports modes."""
        lengths, (values, factors) = self.kernel.lengths, self.kernel.mode_values()
        return ModeKernels(values, [min(n, self.l_max) for n in lengths], lengths, factors)

    def constant_kernels(self, rate: float = 1.0) -> ConstantKernels:
        """Return constant kernels that start at lag 0; only valid if the kernel is `constant`."""
        return ConstantKernels(*self.kernel.constant_values(rate), [len(shape.lags) for shape in self.shapes(rate)])

    @property
    def weights(self) -> Tensor | None:
        """The branches' weights (N, C); None if all are 1."""
        return self.alpha if self.decay is None else self.decay

    def scale_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the kernels' factors (N, C), normalised by the running statistics, and the bias (C,)."""
        scale, bias = self.weights, None
        if self.norm is not None and scale is not None:
            gain, shift = (z.view_as(scale) for z in running_affine(self.norm))
            scale, bias = scale * gain, (scale * shift).sum(0)
        return scale, bias

    @property
    def moving_sums(self) -> bool:
        """Whether `constant_kernels` can represent the kernels: causal, constant, and all from lag 0 on."""
        return self.kernel.constant and not self.anticausal and not any(self.offsets)

    @property
    def low_rank(self) -> bool:
        """Whether a merged layer keeps Fourier modes: if they are at most an eighth as many numbers as taps.

        Subclasses of the Fourier kernel do not qualify: their kernels may not be linear in the modes.
        """
        kernel = self.kernel
        return type(kernel) is FourierKernel and RANK_ADVANTAGE * kernel.modes[:, 0].numel() <= self.l_max

    @property
    def modes(self) -> Tensor:
        """The Fourier modes (N, C, M, 2) of `low_rank` branches."""
        assert isinstance(self.kernel, FourierKernel)
        return self.kernel.modes

    @torch.no_grad()
    def merge_modes(self) -> Tensor | None:
        """Scale the modes by `scale_and_bias`, and drop weights and BatchNorm; return the bias (C,) of the sum."""
        if self.modes.is_meta:  # torch would import its compiler to compute without values
            scale, bias = None, None if self.norm is None else self.modes.new_empty(self.kernel.channels)
        else:
            scale, bias = self.scale_and_bias()
        if scale is not None:
            self.kernel.modes = nn.Parameter((scale[..., None, None] * self.modes).to(self.modes.dtype))
        self.alpha = self.decay = self.norm = None
        return bias

    def reference(self, x: Tensor, mask: Tensor | None, rate: float, sequences: int | None = None) -> Tensor:
        """Compute this direction's output by the paper's algorithm; x (B, C, L) is zero where mask is false.

        With `sequences`, batch statistics are those of the first ones.
        """
        return branch_sum(x, self.kernels(rate), self.weights, self.norm, mask, sequences)


def _mirrored(lags: Lags) -> Lags:
    if isinstance(lags, range):
        return range(-1 - lags.start, -1 - lags.stop, -1)
    return tuple(-1 - lag for lag in lags)
