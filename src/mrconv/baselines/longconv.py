"""Long Conv: a free tap for every lag, squashed and smoothed (Fu et al., 2023, "Simple Hardware-Efficient Long...")."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils.checks import check_choice, check_count, check_fraction
from .long_convolution import LongConvolution, normal, parameter, wide


class LongConv(LongConvolution):
    """y = squash(smooth(k)) * u + D u with l_max free taps per channel.

    squash(k) = sign(k) max(|k| - lam, 0);  smooth(k)[t] = mean of k[t - p] .. k[t + p]
    Geometric decay at first: k[h, t] ~ N(0, 0.02^2) exp(-(t / l_max) (d_model / 2)^(h / d_model)).

    Args:
        d_model, l_max: channels and taps.
        lam: what `squash` takes off.
        smooth: p, over how many neighbours on each side `smooth` averages.
        kernel_dropout: share of taps left out in training.
        init: "geometric", or "random" for N(0, 0.002^2).
        bidirectional: a second kernel, backwards in time.
    """

    kernel_parameters = ("k",)

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        lam: float = 0.003,
        smooth: int = 0,
        kernel_dropout: float = 0.0,
        init: str = "geometric",
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, l_max, bidirectional, device=device, dtype=dtype)
        check_choice("init", init, ("geometric", "random"))
        check_fraction("kernel_dropout", kernel_dropout)
        check_count(smooth=smooth)
        if lam < 0:
            raise ValueError(f"lam must not be negative; got {lam!r}")
        self.lam, self.smooth, self.kernel_dropout = lam, smooth, kernel_dropout
        k = normal(self.n_directions, d_model, l_max) * (0.02 if init == "geometric" else 0.002)
        if init == "geometric":
            speed = (d_model / 2) ** (torch.arange(d_model, dtype=k.dtype, device="cpu") / d_model)
            k *= torch.exp(-torch.outer(speed, torch.arange(l_max, dtype=k.dtype, device="cpu") / l_max))
        self.k = parameter(k, device, dtype)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the smoothed, then squashed taps."""
        k = squash(smooth(wide(self.k), self.smooth), self.lam)
        return F.dropout(k, self.kernel_dropout, self.training)[..., :length]


def squash(k: Tensor, lam: float) -> Tensor:
    """Return k with every tap nearer to zero by lam, and zero where that is past it."""
    return F.softshrink(k, lam)


def smooth(k: Tensor, p: int) -> Tensor:
    """Return the mean of 2 p + 1 taps around each, with zeros beyond both ends."""
    return F.avg_pool1d(k, 2 * p + 1, stride=1, padding=p) if p else k
