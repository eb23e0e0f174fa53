"""Input-dependent mixers with an MRConv: as the filter of Hyena, and in place of MEGA's moving average."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils.checks import check_positive_int, valid_mask
from ..layer import MRConv
from ..mixers import option_defaults
from ..streaming.state import MixerState
from .mega import GatedAttention
from .projected_mixer import ProjectedMixer, short_conv


class WithMRConv(ProjectedMixer):
    """A mixer with an MRConv inside, which merges like any other MRConv.

    It runs at one rate only, because the parts around the MRConv count time in samples.
    """

    option_sources: ClassVar[tuple[type[nn.Module], ...]] = (MRConv,)

    def __init__(self, d_model: int, l_max: int, **layer: Any) -> None:
        super().__init__(d_model, l_max, layer.get("bidirectional", False), layer.get("device"), layer.get("dtype"))
        if layer.get("heads", 1) != 1:
            raise ValueError(f"heads must be 1 in a mixer that gates channel by channel; got {layer['heads']!r}")
        self.conv = MRConv(d_model, l_max, **layer)

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return the state of the MRConv."""
        return MixerState(rate, [], conv=self.conv.initial_state(batch))


class MRHyena(WithMRConv):
    """y = W_o (x2 MRConv(x1 v)) + b_o, with (x1, x2, v) = short_conv(W u + b): a Hyena of order 2 (Poli et al., 2023).

    The operator between the gates is diag(x2) K diag(x1), with K the Toeplitz matrix of k_rep. The gates are outside
    of the branches, so that merging stays exact.

    Args:
        d_model, l_max: as for `MRConv`.
        d_conv: taps of the short depthwise convolution; if bidirectional, it is centred.
        layer: options of `MRConv`, device and dtype.
    """

    def __init__(self, d_model: int, l_max: int, *, d_conv: int = 3, **layer: Any) -> None:
        super().__init__(d_model, l_max, **layer)
        check_positive_int(d_conv=d_conv)
        inner = 3 * d_model
        self.into = nn.Linear(d_model, inner, **self.factory)
        self.short = nn.Conv1d(inner, inner, d_conv, groups=inner, **self.factory)
        self.out = nn.Linear(d_model, d_model, **self.factory)

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Gate, convolve, gate; a centred short convolution must not read padding, which the bias makes nonzero."""
        x = self.into(u)
        if lengths is not None:
            x = x.masked_fill(~valid_mask(lengths, x), 0)
        x1, x2, v = short_conv(x, self.short, self._lead).chunk(3, -1)
        return self.out(x2 * self.conv(x1 * v, lengths, rate))

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return the last inputs of the short convolution, (B, d_conv - 1, 3 d_model), and the state of the MRConv."""
        state = super().zero_state(batch, rate)
        past = self.short.weight.new_zeros(batch, self.short.kernel_size[0] - 1, self.short.in_channels)
        return dataclasses.replace(state, memory=[past])

    def stream_chunk(self, u: Tensor, state: MixerState) -> Tensor:
        """Gate, convolve, gate."""
        assert state.conv is not None
        x = self.into(u)
        x = torch.cat([state.memory[0].to(x.dtype), x], 1)
        state.remember([x[:, u.shape[1] :]])
        x1, x2, v = self.short(x.mT).mT.chunk(3, -1)
        y, _ = self.conv.stream(x1 * v, state.conv)
        return self.out(x2 * y)

    @property
    def _lead(self) -> int:
        return self.short.kernel_size[0] // 2 if self.bidirectional else 0


class MRConvAttention(WithMRConv):
    """y = GatedAttention(x, silu(MRConv(x))): MEGA with an MRConv in place of the moving average (Ma et al., 2022).

    Args:
        d_model, l_max: as for `MRConv`.
        chunk: length of the chunks within which positions attend to each other; None for the whole sequence.
        options: d_attention, d_value and attention as for `GatedAttention`; options of `MRConv`; device and dtype.
    """

    option_sources = (GatedAttention, MRConv)

    def __init__(self, d_model: int, l_max: int, *, chunk: int | None = 128, **options: Any) -> None:
        names = option_defaults(GatedAttention).keys() - {"bidirectional"}
        attention = {name: options.pop(name) for name in names & set(options)}
        super().__init__(d_model, l_max, **options)
        self.gated = GatedAttention(
            d_model, l_max, chunk=chunk, bidirectional=self.bidirectional, **attention, **self.factory
        )

    @property
    def state_grows(self) -> bool:
        """Whether attention keeps all keys and values, because there are no chunks."""
        return self.gated.chunk is None

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Convolve and attend."""
        return self.gated(u, F.silu(self.conv(u, lengths, rate)), lengths)

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return the state of the MRConv and an empty cache."""
        return dataclasses.replace(super().zero_state(batch, rate), cache=self.gated.cache(batch))

    def stream_chunk(self, u: Tensor, state: MixerState) -> Tensor:
        """Convolve and attend."""
        assert state.conv is not None
        assert state.cache is not None
        y, _ = self.conv.stream(u, state.conv)
        return self.gated.stream(u, F.silu(y), state.cache)
