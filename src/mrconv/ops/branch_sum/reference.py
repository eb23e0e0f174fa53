"""Reference of `branch_sum`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import Taps
from ..conv import conv_reference
from .op import BranchSum, Normalization


def branch_sum_reference(
    u: Tensor, kernels: Sequence[Taps], normalization: Normalization, sequences: int | None = None
) -> BranchSum:
    """Compute `branch_sum` from the outputs of all branches, by plain differentiable torch; `sync` is ignored.

    With `sequences` it computes `subsampled_branch_sum`.
    """
    n = normalization
    c = torch.stack([conv_reference(u, *kernel) for kernel in kernels])  # (N, B, C, L)
    ends = torch.full(u.shape[:1], u.shape[2], device=u.device) if n.lengths is None else n.lengths
    mask = (torch.arange(u.shape[2], device=u.device) < ends[:, None])[:, None].to(u.dtype)
    counted = mask.clone()
    if sequences is not None:
        counted[sequences:] = 0
    count = counted.sum()
    mean = (c * counted).sum((1, 3)) / count
    centred = c - mean[:, None, :, None]
    var = (centred.square() * counted).sum((1, 3)) / count
    alpha = torch.cat([direction.alpha for direction in n.directions])
    gamma, beta = (
        torch.cat([default(d.alpha) if (x := d[i]) is None else x.view_as(d.alpha) for d in n.directions])
        for i, default in ((1, torch.ones_like), (2, torch.zeros_like))
    )
    normalised = (gamma * torch.rsqrt(var + n.eps))[:, None, :, None] * centred + beta[:, None, :, None]
    y = (alpha[:, None, :, None] * normalised).sum(0) + (0 if n.skip is None else n.skip[:, None] * u)
    return BranchSum(y, mean, var, count)
