"""Reference of `fft_conv`."""

from __future__ import annotations

from torch import Tensor
from torch.fft import irfft, rfft
from torch.nn import functional as F


def fft_conv_reference(
    u: Tensor, kernel: Tensor, lead: int = 0, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute `fft_conv` by plain differentiable FFTs of full length."""
    n = u.shape[-1] + kernel.shape[-1]
    y = irfft(rfft(u, n) * rfft(kernel, n), n)[..., lead : lead + u.shape[-1]]
    y = y if bias is None else y + bias[:, None]
    return F.gelu(y) if gelu else y
