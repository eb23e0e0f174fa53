"""The residual block around a mixer, as in S4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._utils.checks import check_choice, check_fraction, check_input, check_lengths, valid_mask
from .config import BlockOptions, LayerConfig, documented
from .mixers import make_mixer
from .norm import SequenceBatchNorm
from .streaming.state import LayerState, MixerState
from .streaming.streaming_module import StreamingModule


class TiedDropout(nn.Module):
    """Dropout of whole channels of (B, L, D): the mask is constant over the length."""

    option = "dropout"

    def __init__(self, p: float) -> None:
        super().__init__()
        check_fraction(self.option, p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply a random mask in training mode; return x in eval mode."""
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(x.new_ones(self.mask_shape(x)), self.p)

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the mask, which is broadcast over x."""
        return (x.shape[0], 1, x.shape[2])

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        return f"p={self.p:.3g}"


class SequenceLayerNorm(nn.LayerNorm):
    """LayerNorm over channels that returns the dtype of its input; autocast would return float32."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise each position of x (B, L, D); the mask has no effect."""
        return super().forward(x).to(x.dtype)


def block_norm_module(
    name: str, d_model: int, sync_stats: bool = False, momentum: float | None = 0.1, **factory: Any
) -> nn.Module:
    """Return the norm of a block by name; `sync_stats` and `momentum` apply to BatchNorm."""
    check_choice("block_norm", name, ("batch", "layer"))
    if name == "batch":
        return SequenceBatchNorm(d_model, sync_stats=sync_stats, momentum=momentum, **factory)
    return SequenceLayerNorm(d_model, **factory)


@documented(LayerConfig)
@documented(BlockOptions)
class MRConvBlock(StreamingModule, nn.Module):
    """[norm] -> MRConv -> GELU -> dropout -> linear and GLU -> dropout -> residual -> [norm], (B, L, d_model).

    Every option of `MRConv` is a keyword of the block; `sync_stats` and `momentum` apply to the block's BatchNorm too.
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        dropout: float = 0.0,
        tie_dropout: bool = True,
        block_norm: str = "batch",
        prenorm: bool = False,
        mixer: str = "mrconv",
        mixer_options: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **layer: Any,
    ) -> None:
        super().__init__()
        check_fraction("dropout", dropout)
        self.prenorm = prenorm
        self.layer = make_mixer(mixer, d_model, l_max, mixer_options, layer, device=device, dtype=dtype)
        self.dropout = TiedDropout(dropout) if tie_dropout else nn.Dropout(dropout)
        self.mix = nn.Linear(self.layer.heads * d_model, 2 * d_model, device=device, dtype=dtype)
        shared = {name: layer[name] for name in ("sync_stats", "momentum") if name in layer}
        self.norm = block_norm_module(block_norm, d_model, **shared, device=device, dtype=dtype)

    def forward(self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None) -> Tensor:
        """Transform u (B, L, d_model); positions past `lengths` are hidden from the layer and the statistics."""
        check_input(u, self.layer.d_model)
        mask = None
        if lengths is not None:
            lengths = check_lengths(lengths, u.shape[0], u.shape[1])
            mask = valid_mask(lengths, u)
        x = self.norm(u, mask) if self.prenorm else u
        return self._channel_mixing(u, self.layer(x, lengths, rate, gelu=True), mask)

    def _channel_mixing(self, u: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply dropout, the gated linear layer, the residual connection and, after it, the norm."""
        x = u + self.dropout(F.glu(self.mix(self.dropout(x)), -1))
        return x if self.prenorm else self.norm(x, mask)

    def initial_state(self, batch: int, **options: Any) -> LayerState | MixerState:
        """Return the initial state of the layer; the options are those of `MRConv.initial_state`."""
        self.check_streamable()
        return self.layer.initial_state(batch, **options)

    @torch.no_grad()
    def stream(self, u: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Process the next positions u (B, T, d_model); return their outputs and the state, updated in place."""
        self.check_streamable()
        check_input(u, self.layer.d_model)
        y, state = self.layer.stream(self.norm(u) if self.prenorm else u, state)
        return self._channel_mixing(u, F.gelu(y)), state
