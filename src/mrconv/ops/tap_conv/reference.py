"""Reference of `tap_conv`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def tap_conv_reference(
    u: Tensor, values: Tensor, lags: Sequence[int], bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute `tap_conv` by rolling a padded input, differentiably."""
    L, reach = u.shape[-1], max(map(abs, lags), default=0)
    padded = F.pad(u, (reach, reach))
    y = torch.zeros_like(u)
    for value, lag in zip(values.unbind(1), lags, strict=True):
        y = y + value[:, None] * padded.roll(lag, -1)[..., reach : reach + L]
    y = y if bias is None else y + bias[:, None]
    return F.gelu(y) if gelu else y
