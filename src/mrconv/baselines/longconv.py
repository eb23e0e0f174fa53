"""Long Conv: one free tap per lag, squashed and smoothed (Fu et al., 2023, "Simple Hardware-Efficient Long...")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils.checks import check_choice, check_count, check_fraction
from .long_convolution import LongConvolution
from .parameters import as_parameter, standard_normal, upcast


class LongConv(LongConvolution):
    """y = squash(smooth(k)) * u + D u with l_max free taps per channel.

    squash(k) = sign(k) max(|k| - lam, 0);  smooth(k)[t] = mean of k[t - p] .. k[t + p]
    Geometric initialisation: k[h, t] ~ N(0, 0.02^2) exp(-(t / l_max) (d_model / 2)^(h / d_model)).

    Args:
        d_model, l_max: channels and taps.
        lam: threshold of `squash`.
        smooth: p, the number of neighbours on each side that `smooth` averages over.
        kernel_dropout: fraction of taps dropped in training.
        init: "geometric", or "random" for N(0, 0.002^2).
        options: bidirectional, device and dtype.
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
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_choice("init", init, ("geometric", "random"))
        check_fraction("kernel_dropout", kernel_dropout)
        check_count(smooth=smooth)
        if lam < 0:
            raise ValueError(f"lam must not be negative; got {lam!r}")
        self.lam, self.smooth, self.kernel_dropout = lam, smooth, kernel_dropout
        k = standard_normal(self.n_directions, d_model, l_max, device=self.factory["device"])
        k *= 0.02 if init == "geometric" else 0.002
        if init == "geometric" and not k.is_meta:
            speed = (d_model / 2) ** (torch.arange(d_model, dtype=k.dtype, device="cpu") / d_model)
            k *= torch.exp(-torch.outer(speed, torch.arange(l_max, dtype=k.dtype, device="cpu") / l_max))
        self.k = as_parameter(k, **self.factory)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the smoothed, then squashed taps."""
        k = squash(smooth(upcast(self.k), self.smooth), self.lam)
        return F.dropout(k, self.kernel_dropout, self.training)[..., :length]


def squash(k: Tensor, lam: float) -> Tensor:
    """Shrink every tap towards zero by lam."""
    return F.softshrink(k, lam)


def smooth(k: Tensor, p: int) -> Tensor:
    """Return the mean of the 2 p + 1 taps around each tap, with zeros beyond both ends."""
    return F.avg_pool1d(k, 2 * p + 1, stride=1, padding=p) if p else k
