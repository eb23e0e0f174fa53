"""The MRConv layer: N branches in training, computed as one convolution, merged into one kernel for inference."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import ops
from ._utils.checks import (
    check_choice,
    check_decay,
    check_input,
    check_lengths,
    check_momentum,
    check_part,
    check_positive,
    check_positive_int,
    check_rate,
    readable,
    valid_mask,
)
from .branches import Branches, MergedKernel, resolution_lengths
from .config import LayerOptions
from .kernels import CachedIntegerBuffers, FourierKernel, kernel_class, resampled
from .mixers import Mixer
from .norm import update_running_statistics
from .ops import Lags, Taps, compute_dtype
from .streaming.parameter_cache import cacheable, cached, forget
from .streaming.state import LayerState
from .streaming.state_space import FourierSSM, SlidingSSM, fourier_ssm, sliding_ssm
from .streaming.streamed_kernel import StreamedKernel, sliding_kernel
from .streaming.streamer import ConvolutionStreamer

M = TypeVar("M", bound=nn.Module)
FORMAT_VERSION = 2
"""Version of the names and shapes in state dicts and saved models."""


def as_autocast(u: Tensor) -> Tensor:
    """Cast u to autocast's dtype if u is float32 and autocast is on, as torch does for its convolutions."""
    if u.dtype != torch.float32 or u.is_meta or not torch.is_autocast_enabled(u.device.type):
        return u
    return u.to(torch.get_autocast_dtype(u.device.type))


class MRConv(Mixer, CachedIntegerBuffers):
    """Multi-resolution convolution over sequences, (B, L, d_model) -> (B, L, heads * d_model).

    y = sum_i alpha_i BN_i(k_i * u) + D u, where the kernels k_i double in length up to l_max. The layer computes one
    convolution with k_rep = sum_i alpha_i gamma_i / sqrt(var_i + eps) k_i, also in training, where the batch statistics
    are computed without the outputs of the branches. `reparameterize()` keeps k_rep, dense or as a few Fourier modes.

    Args:
        d_model: number of channels of the input.
        l_max: length of the longest kernel; inputs may be shorter or longer.
        kernel: parameterisation of the k_i; `mrconv.kernels.kernel_names()` lists them.
        kernel_size: l0, the length of the first kernel; determines the number of parameters of each kernel.
        bidirectional: add kernels that run backwards in time; their tap 0 acts on u[t + 1].
        combine: "sum", or "concat" to put the kernels one after the other (Path-X).
        decay: for "concat", fix the weight of kernel i at decay**(N-1-i), normalised to unit sum of squares,
            in place of a learned alpha; a pair (min, max) is spread over the channels.
        norm: "batch" (alpha and BatchNorm per branch), "scale" (alpha only) or "none".
            None means "batch" for "sum", "scale" for "concat".
        heads: independent kernels per channel; multiplies the output's channels.
        groups: number of channel groups that share one set of kernels: channel d uses kernel d % (d_model // groups).
        backend: "reference" (N convolutions and N BatchNorms), "torch" (one convolution), "triton", or "auto".
        eps, momentum: eps and momentum of the branches' BatchNorms; a block uses the momentum for its BatchNorm too.
        sync_stats: compute the statistics over all processes of `torch.distributed`; a block's BatchNorm does so too.
        stats_fraction: part of the batch's sequences that the statistics come from, the first ones, rounded up, which
            must not be empty; the others are convolved with the kernel that results. Less work than for all (1.0), and
            noisier statistics.
        rate: sampling rate of the input relative to that of training; continuous kernels only.
        merged: build the layer merged, to load a merged checkpoint.
        seed: seed of the tap positions of sparse kernels; None draws one from torch's generator.
    """

    _version = FORMAT_VERSION
    kernel_parameters = ("weight",)  # of a merged layer
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    lags: Tensor | None

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        kernel: str = "fourier",
        kernel_size: int = 1,
        bidirectional: bool = False,
        combine: str = "sum",
        decay: float | Sequence[float] | None = None,
        norm: str | None = None,
        heads: int = 1,
        groups: int = 1,
        backend: str = "auto",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        sync_stats: bool = False,
        stats_fraction: float = 1.0,
        rate: float = 1.0,
        merged: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, l_max, bidirectional, device, dtype)
        check_positive_int(kernel_size=kernel_size, heads=heads, groups=groups)
        check_choice("combine", combine, ("sum", "concat"))
        norm = norm or ("batch" if combine == "sum" else "scale")
        check_choice("norm", norm, ("batch", "scale", "none"))
        check_choice("backend", backend, ("reference", "torch", "triton", "auto"))
        continuous = kernel_class(kernel).continuous
        check_rate(rate, kernel, continuous)
        check_positive(eps=eps)
        check_momentum(momentum)
        check_part("stats_fraction", stats_fraction)
        if kernel_size > l_max:
            raise ValueError(f"kernel_size must be at most l_max = {l_max}; got {kernel_size}")
        if d_model % groups:
            raise ValueError(f"groups must divide d_model = {d_model}; got {groups}")
        if combine == "concat" and norm == "batch":
            raise ValueError("norm='batch' needs combine='sum'; with combine='concat' use norm='scale' or 'none'")
        if backend == "reference" and sync_stats:
            raise ValueError("sync_stats=True needs backend='torch' or 'auto': the reference has local statistics only")

        self.kernel, self.kernel_size, self.continuous = kernel, kernel_size, continuous
        self.combine, self.norm, self.heads, self.groups = combine, norm, heads, groups
        self.backend, self.sync_stats, self.stats_fraction = backend, sync_stats, float(stats_fraction)
        self.rate, self.merged, self._warned = float(rate), False, False
        self._selected: tuple[Any, Any, ops.Selection] | None = None
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        decay = check_decay(decay, combine)
        options = LayerOptions(
            kernel=kernel, kernel_size=kernel_size, combine=combine, norm=norm, decay=decay, eps=eps, momentum=momentum
        )
        channels, factory = heads * d_model // groups, dict[str, Any](device=device, dtype=dtype)
        self.branches = nn.ModuleList(
            Branches(channels, l_max, options, anticausal=direction == 1, seed=seed + direction, **factory)
            for direction in range(self.n_directions)
        )
        self._check_stats_fraction()
        self.D: nn.Parameter | None = nn.Parameter(torch.empty(heads * d_model, **factory))
        nn.init.normal_(self.D)
        self.register_parameter("weight", None)  # `reparameterize` sets these
        self.register_parameter("bias", None)
        self.register_buffer("lags", None)
        if merged:
            self.reparameterize()

    def _check_stats_fraction(self) -> None:
        if self.stats_fraction == 1:
            return
        if self.norm != "batch":
            raise ValueError(f"stats_fraction={self.stats_fraction:g} needs norm='batch'; got norm={self.norm!r}")
        if any(direction.kernel.constant for direction in self.directions):
            raise ValueError(
                f"stats_fraction={self.stats_fraction:g} needs kernels that are not constant: BatchNorm cancels the "
                f"height of a constant one, kernel={self.kernel!r} with kernel_size=1, and rounding would move it"
            )

    @property
    def resolutions(self) -> int:
        """N, the number of kernels per direction."""
        return len(resolution_lengths(self.l_max, self.kernel_size, self.combine))

    @property
    def directions(self) -> list[Branches]:
        """The branches that run forwards in time and, if bidirectional, those that run backwards.

        A merged layer has branches only if it is low rank: Fourier modes without weights and BatchNorm.
        """
        return list(self.branches)  # type: ignore[arg-type]

    @property
    def branch_norms(self) -> list[nn.BatchNorm1d]:
        """The BatchNorm of each direction's branches; none if merged or without norm="batch"."""
        return [direction.norm for direction in self.directions if direction.norm is not None]

    @property
    def _synchronises(self) -> bool:
        """Whether batch statistics are those of all processes."""
        return self.sync_stats or any(isinstance(norm, nn.SyncBatchNorm) for norm in self.branch_norms)

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the output depends on the batch's statistics: norm="batch" in training mode, not merged."""
        return any(norm.training for norm in self.branch_norms)

    def forward(
        self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None, gelu: bool = False
    ) -> Tensor:
        """Convolve u (B, L, d_model) -> (B, L, heads * d_model), in u's dtype or, from float32, in autocast's.

        Positions from `lengths` (B,) on are treated as absent: zero in, zero out, not in the statistics. With `gelu`
        the output is GELU(y), computed in the same pass over memory if possible.
        """
        check_input(u, self.d_model)
        rate = self._resolve_rate(rate)
        if lengths is None:
            return as_autocast(self.convolve(self._cast(u), None, rate, gelu))
        lengths = check_lengths(lengths, u.shape[0], u.shape[1])
        # Drop positions past the longest sequence: less work, and padding cannot make the statistics less accurate.
        longest = int(lengths.max()) if readable(lengths) else u.shape[1]
        if longest == 0:
            if not (self.uses_batch_statistics and self._synchronises):
                return as_autocast(self._cast(u).new_zeros(*u.shape[:2], self.heads * self.d_model))
            longest = 1  # the other processes wait for the sums of this one
        lengths = lengths.to(u.device)
        if self._masks_inside:
            y = self.convolve(self._cast(u[:, :longest]), lengths, rate, gelu)
            return y if longest == u.shape[1] else ops.mask_positions(y, lengths, u.shape[1])
        x = ops.mask_positions(u, lengths, longest, self._cast(u[:0]).dtype)
        y = self.convolve(x, lengths, rate, gelu)
        return ops.mask_positions(y, lengths, u.shape[1], as_autocast(y[:0]).dtype)

    @property
    def _masks_inside(self) -> bool:
        """Whether `convolve` masks its input and output: one convolution, which does so as it loads and stores."""
        reference = self.backend == "reference" and not self.merged
        return self.groups == 1 and not reference and not self.uses_batch_statistics

    def convolve(self, u: Tensor, lengths: Tensor | None, rate: float, gelu: bool = False) -> Tensor:
        """Compute `forward` without its checks and casts, and without its masks unless `_masks_inside`.

        If it does not mask, u (B, L, d_model) is zero from `lengths` on and the output there is undefined. With `gelu`,
        the output is passed through GELU: inside the convolution's last pass over memory if no gradients are needed,
        after it otherwise.
        """
        B, L, _ = u.shape
        x = u.transpose(1, 2).reshape(B * self.groups, self.d_model // self.groups, L)
        if self.heads > 1:
            x = x.repeat(1, self.heads, 1)
        if lengths is not None and self.groups > 1:
            lengths = lengths.repeat_interleave(self.groups, output_size=B * self.groups)
        skip = self.D if self.groups > 1 else None  # with one group, the convolution includes the skip
        if self.backend == "reference" and not self.merged:
            y, skip = self._reference(x, lengths, rate), self.D
        elif self.uses_batch_statistics:
            y = self._normalised_branches(x, lengths, rate)
        else:
            fused = gelu and self.groups == 1 and not self._needs_gradients(x)  # the gradient of GELU needs its input
            y, gelu = self._merged_conv(x, lengths if self._masks_inside else None, rate, fused), gelu and not fused
        x, y = (z.reshape(B, self.heads * self.d_model, L) for z in (x, y))
        if skip is not None:
            y = y + skip[:, None].to(x.dtype) * x
        y = y.transpose(1, 2)
        return F.gelu(y) if gelu else y

    def check_streamable(self) -> None:
        """Raise ValueError if outputs depend on later inputs: if bidirectional, or with batch statistics."""
        if self.bidirectional:
            raise ValueError("bidirectional=True: the layer needs the future of its input and cannot stream")
        if self.uses_batch_statistics:
            raise ValueError("norm='batch' in training mode needs whole sequences: call .eval() to stream")

    def zero_state(self, batch: int, rate: float) -> LayerState:
        """Return the state before the first input; its inputs have the layer's dtype."""
        parameter = next(self.parameters())
        return self._streamer(rate).initial_state(self.d_model, batch, rate, parameter.device, parameter.dtype)

    def constants(self, rate: float) -> ConvolutionStreamer:
        """Return the algorithms that stream the layer at this rate."""
        kernel = sliding_kernel(self.directions[0], rate) if self.directions else None
        if kernel is not None and self.bias is not None:
            kernel = dataclasses.replace(kernel, bias=self.bias.detach().to(kernel.bias))
        if kernel is None:
            values, lags, bias = self.merged_kernel(rate)
            kernel = StreamedKernel(bias, Taps(values, lags))
        return ConvolutionStreamer(kernel, self.D, self.heads, self.groups)

    def stream_chunk(self, u: Tensor, state: LayerState) -> Tensor:
        """Return the outputs (B, T, heads * d_model) of the next positions u (B, T, d_model); update the state."""
        streamer = self._streamer(self._resolve_rate(state.rate))
        streamer.check_state(state, self.d_model)
        return streamer.stream(u, state, lambda x: self.convolve(x, None, state.rate))

    def _streamer(self, rate: float) -> ConvolutionStreamer:
        return cached(self, rate, type(self).constants)

    def to_ssm(
        self, form: str = "sliding", *, states: int | None = None, rate: float | None = None
    ) -> SlidingSSM | FourierSSM:
        """Return the Fourier kernels as a state-space model, with running statistics, without the skip D.

        "sliding" is exact; "fourier" is the form of the paper's appendix, which converges to the kernels with `states`.
        """
        check_choice("form", form, ("sliding", "fourier"))
        self.check_streamable()
        rate = self._resolve_rate(rate)
        kernel = self.directions[0].kernel if self.directions else None
        if not isinstance(kernel, FourierKernel):
            given = "a layer merged into a dense kernel" if kernel is None else f"kernel={self.kernel!r}"
            raise ValueError(f"to_ssm needs kernel='fourier', not merged or merged with its modes; got {given}")
        sliding = sliding_ssm(self.directions[0], kernel, rate)
        if self.bias is not None:
            sliding = dataclasses.replace(sliding, bias=self.bias.detach().to(sliding.bias))
        if form == "sliding":
            return sliding
        return fourier_ssm(sliding, states or 4 * sliding.A.shape[1] + 1)

    def explain(self, u: Tensor, rate: float | None = None) -> ops.Selection:
        """Return the algorithm for inputs like u (B, L, d_model) in the current mode, and all candidates' costs."""
        check_input(u, self.d_model)
        rate, x = self._resolve_rate(rate), self._cast(u[:1, :1]).transpose(1, 2)  # only dtype and device matter
        if self.backend == "reference" and not self.merged:
            return ops.Selection(ops.Algorithm.REFERENCE)
        if self.uses_batch_statistics:
            return self._select_branch_sum(x, rate)
        return self._select_moving_sums(x, rate) or ops.select_conv(x, self.merged_kernel(rate).lags, self._backend)

    def merged_kernel(self, rate: float | None = None, *, include_skip: bool = False) -> MergedKernel:
        """Return the kernel that all branches merge into with the running statistics; differentiable.

        With `include_skip`, the skip D is added to tap 0. It is always there in a layer merged into a dense kernel or
        taps, if groups = 1.
        """
        rate = self._resolve_rate(rate)
        reach = resampled(self.l_max, rate)
        ahead = reach if self.bidirectional else 0
        if self.weight is not None and self.bias is not None:
            lags: Lags = range(-ahead, reach) if self.lags is None else self.integers("lags")
            return MergedKernel(self.weight, lags, self.bias)
        kernels = [kernel for direction in self.directions for kernel in direction.kernels(rate)]
        scales, biases = zip(*(direction.scale_and_bias() for direction in self.directions), strict=True)
        skip = self.D if include_skip else None
        scale = None if scales[0] is None else scales[0] if len(scales) == 1 else torch.cat(scales)
        merged = ops.merge(kernels, ahead, reach, scale, skip, self._backend)
        C = kernels[0].values.shape[0]
        bias: Tensor | None = self.bias
        if bias is None:
            bias = kernels[0].values.new_zeros(C) if biases[0] is None else sum(biases[1:], biases[0])
        return MergedKernel(*merged, bias)

    def _merged_conv(self, x: Tensor, lengths: Tensor | None, rate: float, gelu: bool) -> Tensor:
        """Convolve x (B, C, L) with the merged kernel, and with the skip if groups = 1; add the bias; mask."""
        if self._select_moving_sums(x, rate) is not None and self.bias is not None:
            skip = self.D if self.groups == 1 else None
            x, kernels = ops.mask_sequences(x, lengths), self.directions[0].constant_kernels(rate)
            return ops.mask_sequences(ops.moving_sum_conv(x, *kernels, skip, self.bias, gelu), lengths)
        values, lags, bias = self._inference_kernel(x, rate)
        spectrum = functools.partial(self._inference_spectrum, x, rate)
        return ops.conv(x, values, lags, bias, gelu, self._backend, lengths, spectrum)

    def _select_moving_sums(self, x: Tensor, rate: float) -> ops.Selection | None:
        """Return the selection of moving sums for a merged kernel, None if it cannot or should not run so."""
        if not self.low_rank or not all(each.moving_sums for each in self.directions) or self._needs_gradients(x):
            return None
        selection = ops.select_conv(x, range(resampled(self.l_max, rate)), self._backend, constant=True)
        return selection if selection.algorithm is ops.Algorithm.MOVING_SUM else None

    def _needs_gradients(self, *inputs: Tensor) -> bool:
        return torch.is_grad_enabled() and any(z.requires_grad for z in (*inputs, *self.parameters()))

    def _inference_kernel(self, x: Tensor, rate: float) -> MergedKernel:
        """Return the merged kernel for x, with the skip if groups = 1.

        Modes, and taps that x is not convolved with as taps, become a dense kernel once, if no graph records it.
        """
        if self.merged and cacheable(tensors := self._kernel_tensors()):
            if self.low_rank:
                return cached(self, rate, MRConv._expand, tensors=tensors)
            if self.lags is not None and not self._convolves_by_taps(x):
                return cached(self, rate, MRConv._densify, tensors=tensors)
        return self._expand(rate)

    def _inference_spectrum(self, x: Tensor, rate: float) -> Tensor | None:
        """Return the spectrum of the merged kernel for inputs like x, None if it may not be kept."""
        if not self.merged or not cacheable(tensors := self._kernel_tensors()):
            return None
        return cached(self, (rate, x.shape[-1], x.dtype), MRConv._spectrum, tensors=tensors, latest=True)

    def _kernel_tensors(self) -> list[Tensor]:
        """Return what the kernel of a merged layer depends on."""
        modes = [direction.modes for direction in self.directions]
        return [x for x in (self.weight, self.bias, self.lags, self.D, *modes) if x is not None]

    def _spectrum(self, like: tuple[float, int, torch.dtype]) -> Tensor:
        rate, L, dtype = like
        values, lags, _ = self._expand(rate)
        kernel, lead = ops.around_zero(*ops.dense_taps(values, lags))
        u = values.new_empty(1, dtype=dtype).expand(1, len(values), L)
        return ops.kernel_spectrum(u, kernel, lead, self._backend)

    def _convolves_by_taps(self, x: Tensor) -> bool:
        return ops.select_conv(x, self.integers("lags"), self._backend).algorithm is ops.Algorithm.TAPS

    def _expand(self, rate: float) -> MergedKernel:
        return self.merged_kernel(rate, include_skip=self.groups == 1)

    def _densify(self, rate: float) -> MergedKernel:
        values, lags, bias = self._expand(rate)
        return MergedKernel(*ops.dense_taps(values, lags), bias)

    def k_rep(self, rate: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the merged kernel, dense, and its bias, from the running statistics; differentiable.

        The kernel is (C, l_max), or (2, C, l_max) if bidirectional, with C = heads * d_model / groups; at another
        rate it has rate * l_max taps. It does not include the skip D, except in a layer with groups = 1 that was merged
        into a dense kernel or taps, where D is in tap 0.
        """
        rate = self._resolve_rate(rate)
        values, lags, bias = self.merged_kernel(rate)
        reach = resampled(self.l_max, rate)
        ahead = reach if self.bidirectional else 0
        kernel = ops.densify(values, lags, ahead, reach)
        if self.bidirectional:
            kernel = torch.stack([kernel[:, ahead:], kernel[:, :ahead].flip(1)])
        return kernel, bias

    @property
    def low_rank(self) -> bool:
        """Whether the layer is merged into Fourier modes instead of a dense kernel or taps."""
        return self.merged and self.weight is None

    @torch.no_grad()
    def reparameterize(self, rate: float | None = None, *, dense: bool = False) -> MRConv:
        """Merge the branches into one kernel and a bias, in place, at this rate; set the layer to eval mode.

        Fourier kernels whose modes are at most l_max / 8 numbers stay modes (`low_rank`), unless `dense` is set: the
        state dict then holds the modes, scaled, `bias` and `D`. Else it holds `weight`, `bias` and, if the kernel is
        scattered taps, their `lags`; `D` is in tap 0 if groups = 1. Merging again has no effect, except that `dense`
        replaces modes by a dense kernel.
        """
        rate = self._resolve_rate(rate)
        if self.merged and not (dense and self.low_rank):
            return self
        self.check_mergeable()
        if not dense and all(direction.low_rank for direction in self.directions):
            self._merge_modes()
        else:
            self._merge_taps(rate)
        self.rate, self.merged = rate, True
        return self.eval()

    def _merge_modes(self) -> None:
        assert self.D is not None
        biases = [bias for direction in self.directions if (bias := direction.merge_modes()) is not None]
        bias = sum(biases[1:], biases[0]) if biases else self.D.new_zeros(self.directions[0].kernel.channels)
        self.bias = nn.Parameter(bias.to(self.D.dtype))

    def _merge_taps(self, rate: float) -> None:
        assert self.D is not None
        values, lags, bias = self._without_values(rate) if self.D.is_meta else self._expand(rate)
        dtype = self.D.dtype
        self.weight, self.bias = nn.Parameter(values.to(dtype)), nn.Parameter(bias.to(dtype))
        if not isinstance(lags, range):
            self.lags = torch.tensor(lags, device="cpu")
            self.integers("lags")
            self.lags = self.lags.to(values.device)
        self._drop_branches()

    def _without_values(self, rate: float) -> MergedKernel:
        """Return an uninitialised kernel of the shape of `_expand`."""
        assert self.D is not None
        reach, taps = resampled(self.l_max, rate), [each.lags for d in self.directions for each in d.shapes(rate)]
        lags: Lags = range(-reach if self.bidirectional else 0, reach)
        if not all(isinstance(each, range) for each in taps):
            skip = {0} if self.groups == 1 else set()
            lags = tuple(sorted(skip.union(*taps)))
        C = self.directions[0].kernel.channels
        return MergedKernel(self.D.new_empty(C, len(lags)), lags, self.D.new_empty(C))

    def _drop_branches(self) -> None:
        self.branches = nn.ModuleList()
        if self.groups == 1:
            self.D = None

    def check_mergeable(self, name: str = "the layer") -> None:
        """Raise ValueError if a statistic, and therefore the merged kernel, is NaN or infinite."""
        for key, buffer in self.named_buffers():
            if not buffer.is_meta and not buffer.isfinite().all():
                raise ValueError(f"{name} cannot be merged: {key} holds NaN or infinity; load an earlier checkpoint")

    def train(self, mode: bool = True) -> MRConv:
        """Set the mode; a merged layer warns once that it has no branches to train."""
        forget(self)  # `.data` writes bypass version counters
        if mode and self.merged and not self._warned:
            self._warned = True
            warnings.warn("this MRConv is merged: training continues with its single kernel", stacklevel=2)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Draw new parameters and reset the running statistics."""
        if self.D is None or self.merged:
            raise RuntimeError("a merged MRConv has no branches to reset: build a new layer")
        nn.init.normal_(self.D)
        for direction in self.directions:
            direction.reset_parameters()

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        state = f"merged at rate {self.rate:g}" if self.merged else f"norm={self.norm!r}"
        return (
            f"{self.d_model}, l_max={self.l_max}, kernel={self.kernel!r}, kernel_size={self.kernel_size}, "
            f"resolutions={self.resolutions}, combine={self.combine!r}, bidirectional={self.bidirectional}, "
            f"heads={self.heads}, groups={self.groups}, {state}"
        )

    def _resolve_rate(self, rate: float | None) -> float:
        if rate is None:
            return self.rate
        check_rate(rate, self.kernel, self.continuous)
        if self.merged and rate != self.rate:
            raise ValueError(
                f"rate={rate:g}: this layer was merged at rate {self.rate:g} and runs at that rate only; "
                f"merge the trained layer with reparameterize(rate={rate:g})"
            )
        return float(rate)

    def _reference(self, x: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Compute the branches by the paper's algorithm."""
        mask = None if lengths is None else valid_mask(lengths, x.transpose(1, 2))[..., 0]
        wide = x.to(compute_dtype(x))
        counted = self._num_counted(len(x))
        total = torch.stack([direction.reference(wide, mask, rate, counted) for direction in self.directions]).sum(0)
        return total.to(x.dtype)

    def _select_branch_sum(self, x: Tensor, rate: float) -> ops.Selection:
        each = [direction.shapes(rate) for direction in self.directions]
        shapes = [shape for direction in each for shape in direction]
        if self.stats_fraction < 1:  # the convolution of the other sequences needs kernels, not modes
            shapes = [ops.BranchShape(shape.lags, shape.values) for shape in shapes]
        if torch.compiler.is_compiling():
            return ops.select_branch_sum(x, shapes, self._backend)
        key = x.dtype, x.device, self.backend
        known = self._selected
        if known is None or known[0] != key or any(a is not b for a, b in zip(known[1], each, strict=True)):
            known = self._selected = key, each, ops.select_branch_sum(x, shapes, self._backend)
        return known[2]

    def _cast(self, u: Tensor) -> Tensor:
        """Return u as autocast casts it, except for training with constant kernels, which is fastest in float32."""
        constant = self.kernel_size == 1 and self.kernel == "fourier"
        return u if constant and self.uses_batch_statistics else as_autocast(u)

    @property
    def _backend(self) -> str:
        return "torch" if self.backend == "reference" else self.backend

    def _normalised_branches(self, x: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Compute the branches with batch statistics, and update the running statistics."""
        norms, directions = self.branch_norms, self.directions
        sync = self._synchronises
        counted = self._num_counted(len(x))
        if (counted or len(x)) * x.shape[2] == 1 and not sync:
            given = "batch 1" if counted is None else f"1 of {len(x)} sequences counted by stats_fraction"
            raise ValueError(f"norm='batch' in training needs more than 1 value per channel; got {given} and length 1")
        weights = [
            ops.BranchWeights(direction.alpha, norm.weight, norm.bias)
            for direction, norm in zip(directions, norms, strict=True)
            if direction.alpha is not None
        ]
        skip = self.D if self.groups == 1 else None
        normalization = ops.Normalization(weights, skip, lengths, norms[0].eps, sync)
        selection = self._select_branch_sum(x, rate)
        kernels = self._branch_kernels(selection, rate)
        if counted is None:
            y, *statistics = ops.branch_sum(x, kernels, normalization, selection)
        else:
            y, *statistics = ops.subsampled_branch_sum(x, kernels, normalization, counted, selection, self._backend)
        update_running_statistics(norms, *statistics)
        return y

    def _num_counted(self, sequences: int) -> int | None:
        """Return how many of these sequences the batch statistics come from, None for all.

        Each group of channels is a sequence of its own here.
        """
        counted = self.groups * math.ceil(self.stats_fraction * sequences / self.groups - 1e-9)  # 0.07 * 100 > 7
        return counted if counted < sequences else None

    def _branch_kernels(self, selection: ops.Selection, rate: float) -> ops.Kernels:
        """Return the kernels of all directions in the form that this algorithm takes with the fewest launches."""
        directions = self.directions
        if selection.algorithm is ops.Algorithm.MOVING_MODES:
            return directions[0].mode_kernels()
        if selection.algorithm is ops.Algorithm.MOVING_SUM:
            return directions[0].constant_kernels(rate)
        if rate == 1 and directions[0].kernel.positions is None:
            sizes = [len(shape.lags) for direction in directions for shape in direction.shapes()]
            values = type(directions[0].kernel).packed([direction.kernel for direction in directions], sizes)
            if values is not None:
                return ops.PackedKernels(values, sizes, len(sizes) // len(directions))
        return [kernel for direction in directions for kernel in direction.kernels(rate)]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *args: Any
    ) -> None:
        errors: list[str] = args[-1]
        where = prefix.removesuffix(".") or "the layer"
        version = metadata.get("version") or 0
        if version > FORMAT_VERSION:
            errors.append(
                f"{where}: the checkpoint has format {version}, newer than this mrconv's {FORMAT_VERSION}: "
                "upgrade mrconv"
            )
        weight, lags = state_dict.get(prefix + "weight"), state_dict.get(prefix + "lags")
        if self.merged != (prefix + "bias" in state_dict) and any(key.startswith(prefix) for key in state_dict):
            errors.append(
                f"{where}: the checkpoint is not merged and this model is: build it with merged=False"
                if self.merged
                else f"{where}: the checkpoint is merged and this model is not: build it with merged=True"
            )
        elif self.low_rank and weight is not None:
            self._adopt_dense()
        elif self.merged and not self.low_rank and weight is None and prefix + "bias" in state_dict:
            errors.append(f"{where}: the checkpoint holds modes and this layer a dense kernel: build the layer again")
        if self.lags is not None and weight is not None and lags is not None:
            self._adopt_taps(where, weight, lags, errors)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *args)

    def _adopt_dense(self) -> None:
        """Replace the modes by a dense kernel; files of format 1 hold one, and layers merged with `dense`."""
        assert self.bias is not None
        reach = resampled(self.l_max, self.rate)
        self.weight = nn.Parameter(self.bias.new_empty(len(self.bias), self.n_directions * reach))
        self._drop_branches()

    def _adopt_taps(self, where: str, weight: Tensor, lags: Tensor, errors: list[str]) -> None:
        """Resize `weight` and `lags` to the checkpoint's taps; how many there are depends on the positions drawn."""
        reach = resampled(self.l_max, self.rate)
        first, last = (-reach if self.bidirectional else 0), reach - 1
        if not lags.is_meta and not ((lags >= first) & (lags <= last)).all():
            errors.append(f"{where}: the checkpoint has taps outside of this layer's lags {first} .. {last}")
        elif self.weight is not None and weight.shape[0] == self.weight.shape[0] and weight.shape != self.weight.shape:
            values = self.weight.new_empty(weight.shape)
            self.weight = nn.Parameter(values, requires_grad=self.weight.requires_grad)
            self.lags = torch.zeros(lags.shape, dtype=lags.dtype, device=values.device)


def reparameterize(model: M, rate: float | None = None, *, dense: bool = False) -> M:
    """Merge every MRConv of a model in place, set the model to eval mode and return it.

    With `dense`, kernels of few Fourier modes become dense as well, which takes more memory.
    """
    if rate not in (None, 1):
        _check_all_merge(model, rate)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MRConv)}
    for name, layer in layers.items():
        layer.check_mergeable(name or "the layer")
    for layer in layers.values():
        layer.reparameterize(rate, dense=dense)
    return model.eval()


def _check_all_merge(model: nn.Module, rate: float) -> None:
    """Raise ValueError if a mixer is not an MRConv: only an MRConv can be merged at another rate."""
    for name, module in model.named_modules():
        if isinstance(module, Mixer) and not isinstance(module, MRConv):
            raise ValueError(
                f"rate={rate!r}: {name or 'the model'} is a {type(module).__name__}, which is not merged at a rate; "
                f"pass the rate to each call of the model instead"
            )
