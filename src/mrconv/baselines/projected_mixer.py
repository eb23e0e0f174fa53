"""The base class of mixers with linear projections."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..mixers import Mixer


class ProjectedMixer(Mixer):
    """A mixer with linear projections. It needs the lengths, because biases make padding nonzero.

    Autocast stays enabled, for the projections.
    """

    projects = True

    def transform(self, u: Tensor, lengths: Tensor | None, rate: float, gelu: bool) -> Tensor:
        """Mix u (B, L, d_model), in u's dtype."""
        y = self.mix_padded(u, lengths, rate)
        return (F.gelu(y) if gelu else y).to(u.dtype)

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Mix u (B, L, d_model), which is zero from `lengths` on; the output there is discarded."""
        raise NotImplementedError


def short_conv(x: Tensor, conv: nn.Conv1d, lead: int = 0) -> Tensor:
    """Convolve x (B, L, E) along L, keeping its length, with `lead` taps ahead of the position."""
    return conv(F.pad(x.mT, (conv.kernel_size[0] - 1 - lead, lead))).mT
