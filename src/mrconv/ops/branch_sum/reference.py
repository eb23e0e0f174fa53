"""Reference of `branch_sum`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import Taps
from ..conv import conv_reference
from .op import BranchSum, Normalization


def branch_sum_reference(u: Tensor, kernels: Sequence[Taps], normalization: Normalization) -> BranchSum:
    """Compute `branch_sum` from the outputs of all branches, by plain differentiable torch; `sync` is ignored."""
    n = normalization
    c = torch.stack([conv_reference(u, *kernel) for kernel in kernels])  # (N, B, C, L)
    ends = torch.full(u.shape[:1], u.shape[2], device=u.device) if n.lengths is None else n.lengths
    mask = (torch.arange(u.shape[2], device=u.device) < ends[:, None])[:, None].to(u.dtype)
    count = mask.sum()
    mean = (c * mask).sum((1, 3)) / count
    centred = c - mean[:, None, :, None]
    var = (centred.square() * mask).sum((1, 3)) / count
    y = (n.weight * torch.rsqrt(var + n.eps))[:, None, :, None] * centred
    y = y.sum(0) + (0 if n.skip is None else n.skip[:, None] * u) + (0 if n.bias is None else n.bias[:, None])
    return BranchSum(y, mean, var, count)
