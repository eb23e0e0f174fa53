"""SGConv: sub-kernels of doubling length, interpolated and decaying (Li et al., 2022, "What Makes...")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils.checks import check_count, check_positive_int, positive_pair
from ..kernels import resampled
from .long_convolution import LongConvolution
from .parameters import as_parameter, standard_normal, upcast


class SGConv(LongConvolution):
    """y = k * u + D u with k = (1/Z) Cat(alpha^(N-1) up_1(w_0), alpha^(N-2) up_1(w_1), alpha^(N-3) up_2(w_2), ...).

    Each w_i has `kernel_size` free values. up_s is linear interpolation to s times the length, so that the pieces have
    lengths l, l, 2l, 4l, .... Z is the norm of the initial kernel and stays fixed (equation 1). At another rate the
    pieces are interpolated to other lengths.

    Args:
        d_model: number of channels.
        l_max: total length of the pieces.
        kernel_size: values of each w_i.
        decay: alpha, or a pair (min, max) spread over the channels.
        init_scale: the first piece is interpolated by 2**init_scale.
        options: bidirectional, device and dtype.
    """

    continuous = True
    kernel_parameters = ("w",)
    Z: Tensor
    decay: Tensor

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        kernel_size: int = 64,
        decay: float | Sequence[float] = 2.0,
        init_scale: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_positive_int(kernel_size=kernel_size)
        check_count(init_scale=init_scale)
        self.kernel_size = kernel_size
        scales = max(1, 1 + math.ceil(math.log2(l_max / kernel_size)) - init_scale)
        self.factors = [2 ** (max(0, i - 1) + init_scale) for i in range(scales)]
        shape = (self.n_directions, d_model, kernel_size)
        self.w = nn.ParameterList(as_parameter(standard_normal(*shape), **self.factory) for _ in range(scales))
        low, high = positive_pair("decay", decay)
        self.register_buffer("decay", torch.linspace(low, high, d_model, **self.factory)[:, None])
        self.register_buffer("Z", torch.ones(self.n_directions, d_model, 1, **self.factory))
        with torch.no_grad():
            self.Z.copy_(self.kernel(kernel_size * sum(self.factors), 1.0).norm(dim=-1, keepdim=True))

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the pieces one after the other, cut at this length or padded with zeros.

        Pieces beyond the length contribute an empty slice, so that every parameter has a gradient.
        """
        pieces: list[Tensor] = []
        missing = length
        for i, (w, factor) in enumerate(zip(self.w, self.factors, strict=True)):
            size = resampled(self.kernel_size * factor, rate)
            scaled = upcast(w) * upcast(self.decay) ** (len(self.factors) - 1 - i)
            piece = F.interpolate(scaled, size, mode="linear") if missing else scaled
            pieces.append(piece[..., :missing])
            missing = max(0, missing - size)
        return F.pad(torch.cat(pieces, -1), (0, missing)) / (upcast(self.Z) * rate)
