"""Reference of `moving_sum_conv`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F


def moving_sum_conv_reference(
    u: Tensor,
    values: Tensor,
    factors: Sequence[float],
    widths: Sequence[int],
    skip: Tensor | None,
    bias: Tensor,
    gelu: bool = False,
) -> Tensor:
    """Compute `moving_sum_conv` by shifted cumulative sums."""
    total = F.pad(u.cumsum(2), (max(widths), 0))
    y = bias[:, None] if skip is None else skip[:, None] * u + bias[:, None]
    for height, factor, width in zip(values.flatten(2)[..., 0], factors, widths, strict=True):
        before = total[..., max(widths) - width : total.shape[2] - width]
        y = y + factor * height[:, None] * (total[..., max(widths) :] - before)
    return F.gelu(y) if gelu else y
