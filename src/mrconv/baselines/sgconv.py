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
from .long_convolution import LongConvolution, normal, parameter, wide


class SGConv(LongConvolution):
    """y = k * u + D u with k = (1/Z) Cat(alpha^(N-1) up_1(w_0), alpha^(N-2) up_1(w_1), alpha^(N-3) up_2(w_2), ...).

    Each w_i has `kernel_size` free values, up_s is linear interpolation to s times the length (so that the pieces
    have lengths l, l, 2l, 4l, ...), and Z is the norm of the whole kernel at first, which then stays (equation 1).
    At another rate the pieces are interpolated to other lengths.

    Args:
        d_model: channels.
        l_max: length that the pieces together reach.
        kernel_size: values of each w_i.
        decay: alpha, or a pair (min, max) spread over the channels.
        init_scale: the first piece is interpolated by 2**init_scale already.
        bidirectional: a second set of pieces, backwards in time.
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
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, l_max, bidirectional, device=device, dtype=dtype)
        check_positive_int(kernel_size=kernel_size)
        check_count(init_scale=init_scale)
        self.kernel_size = kernel_size
        scales = max(1, 1 + math.ceil(math.log2(l_max / kernel_size)) - init_scale)
        self.factors = [2 ** (max(0, i - 1) + init_scale) for i in range(scales)]
        self.w = nn.ParameterList(
            parameter(normal(self.n_directions, d_model, kernel_size), device, dtype) for _ in range(scales)
        )
        low, high = positive_pair("decay", decay)
        like: Any = {"device": self.D.device, "dtype": self.D.dtype}
        self.register_buffer("decay", torch.linspace(low, high, d_model, **like)[:, None])
        self.register_buffer("Z", torch.ones(self.n_directions, d_model, 1, **like))
        with torch.no_grad():
            self.Z.copy_(self.kernel(kernel_size * sum(self.factors), 1.0).norm(dim=-1, keepdim=True))

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the pieces one after the other, up to this length, and zeros after the last.

        All take part, those beyond the length with none of their values: every parameter has a gradient then.
        """
        pieces: list[Tensor] = []
        missing = length
        for i, (w, factor) in enumerate(zip(self.w, self.factors, strict=True)):
            size = resampled(self.kernel_size * factor, rate)
            scaled = wide(w) * wide(self.decay) ** (len(self.factors) - 1 - i)
            piece = F.interpolate(scaled, size, mode="linear") if missing else scaled
            pieces.append(piece[..., :missing])
            missing = max(0, missing - size)
        return F.pad(torch.cat(pieces, -1), (0, missing)) / (wide(self.Z) * rate)
