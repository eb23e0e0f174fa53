"""The MRConv layer: N branches in training, computed as one convolution, merged into one kernel for inference."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .branches import Branches
from .kernels import kernel_class, resampled
from .ops import Lags, Taps, compute_dtype
from .validation import check_choice, check_decay, check_input, check_lengths, check_positive_int, check_rate

FORMAT_VERSION = 1
"""Version of the names and shapes in state dicts and saved models."""


class MRConv(nn.Module):
    """Multi-resolution convolution over sequences, (B, L, d_model) -> (B, L, heads * d_model).

    y = sum_i alpha_i BN_i(k_i * u) + D u, the kernels k_i doubling in length up to l_max. Computed as one
    convolution with k_rep = sum_i alpha_i gamma_i / sqrt(var_i + eps) k_i, in training too: the batch statistics
    come from the input's spectrum. `reparameterize()` keeps k_rep and drops the branches.

    Args:
        d_model: channels of the input.
        l_max: length the longest kernel reaches; inputs may be shorter or longer.
        kernel: parameterisation of the k_i; `mrconv.kernels.kernel_names()` lists them.
        kernel_size: l0, the length of the first kernel; sets how many parameters each one has.
        bidirectional: adds kernels that run backwards in time; their tap 0 acts on u[t + 1].
        combine: "sum", or "concat" to put the kernels one after the other (Path-X).
        decay: for "concat", fixes the weight of piece i at decay**(N-1-i), normalised to unit sum of squares,
            in place of a learned alpha; a pair (min, max) is spread over the channels.
        norm: "batch" (alpha and BatchNorm per branch), "scale" (alpha only) or "none".
            None means "batch" for "sum", "scale" for "concat".
        heads: independent kernels per channel; multiplies the output's channels.
        groups: channels share kernels in this many groups: channel d uses kernel d % (d_model // groups).
        backend: "reference" (N convolutions and N BatchNorms), "torch" (one convolution), "triton", or "auto".
        eps, momentum: of the BatchNorms.
        sync_stats: add up the statistics over all processes of `torch.distributed`.
        rate: sampling rate of the input relative to that of training; continuous kernels only.
        merged: build the layer merged, to load a merged checkpoint into.
        seed: of positions that are drawn once (sparse kernels); None draws it from torch's generator.
    """

    _version = FORMAT_VERSION
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
        rate: float = 1.0,
        merged: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_int(d_model=d_model, l_max=l_max, kernel_size=kernel_size, heads=heads, groups=groups)
        check_choice("combine", combine, ("sum", "concat"))
        norm = norm or ("batch" if combine == "sum" else "scale")
        check_choice("norm", norm, ("batch", "scale", "none"))
        check_choice("backend", backend, ("reference", "torch", "triton", "auto"))
        continuous = kernel_class(kernel).continuous
        check_rate(rate, kernel, continuous)
        if kernel_size > l_max:
            raise ValueError(f"kernel_size must be at most l_max = {l_max}; got {kernel_size}")
        if d_model % groups:
            raise ValueError(f"groups must divide d_model = {d_model}; got {groups}")
        if combine == "concat" and norm == "batch":
            raise ValueError("norm='batch' needs combine='sum'; with combine='concat' use norm='scale' or 'none'")
        if backend == "triton":
            raise NotImplementedError("backend='triton' does not exist yet; use 'auto', 'torch' or 'reference'")
        if backend == "reference" and sync_stats:
            raise ValueError("sync_stats=True needs backend='torch' or 'auto': the reference has local statistics only")

        self.d_model, self.l_max, self.kernel_size = d_model, l_max, kernel_size
        self.kernel, self.continuous, self.combine, self.norm = kernel, continuous, combine, norm
        self.bidirectional, self.heads, self.groups, self.backend = bidirectional, heads, groups, backend
        self.rate, self.merged, self._warned = float(rate), False, False
        self._lags: Lags = range(0)
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        self.branches = nn.ModuleList(
            Branches(
                heads * d_model // groups,
                l_max,
                kernel_size,
                kernel=kernel,
                combine=combine,
                norm=norm,
                decay=check_decay(decay, combine),
                eps=eps,
                momentum=momentum,
                sync_stats=sync_stats,
                anticausal=direction == 1,
                seed=seed + direction,
                device=device,
                dtype=dtype,
            )
            for direction in range(1 + bidirectional)
        )
        self.D: nn.Parameter | None = nn.Parameter(torch.empty(heads * d_model, device=device, dtype=dtype))
        nn.init.normal_(self.D)
        if merged:
            self.reparameterize()

    @property
    def resolutions(self) -> int:
        """N, the number of kernels per direction."""
        return math.ceil(math.log2(self.l_max / self.kernel_size)) + 1

    def forward(self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None) -> Tensor:
        """Convolve u (B, L, d_model) -> (B, L, heads * d_model), in u's dtype.

        Positions from `lengths` (B,) on are as if absent: zero in, zero out, not in the statistics.
        """
        check_input(u, self.d_model)
        rate = self._checked(rate)
        B, L, _ = u.shape
        x, mask = u.transpose(1, 2), None
        if lengths is not None:
            lengths = check_lengths(lengths, B, L, u.device)
            mask = torch.arange(L, device=u.device) < lengths[:, None]
            x = x * mask[:, None]
            lengths = lengths.repeat_interleave(self.groups, output_size=B * self.groups)
        x = x.reshape(B * self.groups, self.d_model // self.groups, L).repeat(1, self.heads, 1)

        if self.backend == "reference" and not self.merged:
            y, skip = self._by_branches(x, lengths, rate), self.D
        else:
            y, skip = self._by_one_kernel(x, lengths, rate), self.D if self.groups > 1 else None

        x, y = (z.reshape(B, self.heads * self.d_model, L) for z in (x, y))
        if skip is not None:
            y = y + skip[:, None].to(x.dtype) * x
        if mask is not None:
            y = y * mask[:, None]
        return y.transpose(1, 2)

    def k_rep(self, rate: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the merged kernel, dense, and its bias, from the running statistics; differentiable.

        The kernel is (C, l_max), or (2, C, l_max) if bidirectional, with C = heads * d_model / groups; at another
        rate it has that many times l_max taps. The skip D is not in it, but for a layer that is merged already:
        there tap 0 holds it (if groups = 1).
        """
        rate = self._checked(rate)
        values, lags, bias = self._stored() if self.merged else self._merge(rate)
        reach = resampled(self.l_max, rate)
        ahead = reach if self.bidirectional else 0
        kernel = ops.densify(values, lags, ahead, reach)
        if self.bidirectional:
            kernel = torch.stack([kernel[:, ahead:], kernel[:, :ahead].flip(1)])
        return kernel, bias

    @torch.no_grad()
    def reparameterize(self, rate: float | None = None) -> MRConv:
        """Merge into one kernel and a bias, in place, at this rate; leaves the layer in eval mode.

        The state dict then holds `weight`, `bias` and, where the kernel is taps, their `lags`; `D` is in tap 0, and
        apart only if groups > 1. Merging again changes nothing.
        """
        rate = self._checked(rate)
        if self.merged:
            return self
        assert self.D is not None
        for name, buffer in self.named_buffers():
            if not buffer.is_meta and not buffer.isfinite().all():
                raise ValueError(f"{name} holds NaN or infinity: this layer cannot be merged")
        values, lags, bias = self._merge(rate, skip=self.groups == 1)
        dtype = self.D.dtype
        self.weight, self.bias = nn.Parameter(values.to(dtype)), nn.Parameter(bias.to(dtype))
        self._set_lags(lags)
        self.branches = nn.ModuleList()
        if self.groups == 1:
            self.D = None
        self.rate, self.merged = rate, True
        return self.eval()

    def train(self, mode: bool = True) -> MRConv:
        """Set the mode; a merged layer warns, once, that there are no branches left to train."""
        if mode and self.merged and not self._warned:
            self._warned = True
            warnings.warn("this MRConv is merged: training goes on with the one kernel it has", stacklevel=2)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Draw fresh parameters and forget the running statistics."""
        if self.D is None or self.merged:
            raise RuntimeError("a merged MRConv has no branches to draw anew: build a new layer")
        nn.init.normal_(self.D)
        for branches in self._directions():
            branches.reset_parameters()

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer."""
        state = f"merged at rate {self.rate:g}" if self.merged else f"norm={self.norm!r}"
        return (
            f"{self.d_model}, l_max={self.l_max}, kernel={self.kernel!r}, kernel_size={self.kernel_size}, "
            f"resolutions={self.resolutions}, combine={self.combine!r}, bidirectional={self.bidirectional}, "
            f"heads={self.heads}, groups={self.groups}, {state}"
        )

    def _directions(self) -> list[Branches]:
        return list(self.branches)  # type: ignore[arg-type]

    def _checked(self, rate: float | None) -> float:
        if rate is None:
            return self.rate
        check_rate(rate, self.kernel, self.continuous)
        if self.merged and rate != self.rate:
            raise ValueError(
                f"rate={rate:g}: this layer was merged at rate {self.rate:g} and runs at no other; "
                f"merge the trained layer with reparameterize(rate={rate:g})"
            )
        return float(rate)

    def _by_branches(self, x: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        mask = None if lengths is None else torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        wide = x.to(compute_dtype(x))
        total = torch.stack([branches.reference(wide, mask, rate) for branches in self._directions()]).sum(0)
        return total.to(x.dtype)

    def _by_one_kernel(self, x: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        if self.merged:
            merged = self._stored()
        elif self.training:
            merged = self._merge(rate, self.groups == 1, x, lengths)
        else:
            merged = self._merge(rate, self.groups == 1)
        values, lags, bias = merged
        return ops.conv(x, values, lags) + bias[:, None].to(x.dtype)

    def _stored(self) -> tuple[Tensor, Lags, Tensor]:
        return self.weight, self._lags, self.bias

    def _merge(
        self, rate: float, skip: bool = False, x: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Lags, Tensor]:
        """Add up all branches, normalised by x's statistics or else the running ones, and D if `skip`."""
        every: list[Taps] = []
        biases: list[Tensor] = []
        for branches in self._directions():
            kernels, bias = branches.weighted(rate, x, lengths)
            every += kernels
            biases += [] if bias is None else [bias]
        values, lags = every[0]
        if skip and self.D is not None:
            every.append((self.D[:, None].to(values.dtype), range(1) if isinstance(lags, range) else (0,)))
        reach = resampled(self.l_max, rate)
        merged = ops.merge(every, reach if self.bidirectional else 0, reach)
        return *merged, sum(biases) if biases else values.new_zeros(values.shape[0])  # type: ignore[return-value]

    def _set_lags(self, lags: Lags) -> None:
        """Keep the merged kernel's lags, as numbers to run with and, if they are scattered, as a buffer to save."""
        self._lags = lags
        scattered = None if isinstance(lags, range) else torch.tensor(lags, device=self.weight.device)
        self.register_buffer("lags", scattered)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *args: Any
    ) -> None:
        errors: list[str] = args[-1]
        if (metadata.get("version") or 0) > FORMAT_VERSION:
            errors.append(
                f"{prefix or 'the layer'}: the checkpoint has format {metadata['version']}, newer than this mrconv's "
                f"{FORMAT_VERSION}: upgrade mrconv"
            )
        weight, lags = state_dict.get(prefix + "weight"), state_dict.get(prefix + "lags")
        if weight is not None and not self.merged:
            errors.append(
                f"{prefix or 'the layer'}: the checkpoint is merged and this model is not: build it with merged=True"
            )
        if self.merged and self.lags is not None and weight is not None and lags is not None:
            # Drawn positions may coincide more or less often, so that the number of taps is the checkpoint's to say.
            self.weight = nn.Parameter(self.weight.new_empty(weight.shape))
            self._set_lags(tuple(lags.tolist()))
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *args)


def reparameterize(model: nn.Module, rate: float | None = None) -> nn.Module:
    """Merge every MRConv of a model in place and put the model in eval mode; returns the model."""
    for module in model.modules():
        if isinstance(module, MRConv):
            module.reparameterize(rate)
    return model.eval()
