"""BatchNorm with given statistics: computed with a mask, over several processes, or by `ops.branch_sum`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from ._utils.checks import readable
from .ops import compute_dtype, mean_and_variance


def affine(norm: nn.BatchNorm1d, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) such that `norm` with these statistics is x * scale + shift."""
    scale = norm.weight * torch.rsqrt(var + norm.eps)
    return scale, norm.bias - mean * scale


def running_affine(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Return `affine` with the running statistics, in float32 or float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    dtype = compute_dtype(norm.running_var)
    return affine(norm, norm.running_mean.to(dtype), norm.running_var.to(dtype))


def update_running_statistics(norms: Sequence[nn.BatchNorm1d], mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update the running statistics of one or two norms as `nn.BatchNorm1d` does.

    mean and biased var, over `count` values, are those of the first norm's features, then those of the second's.
    """
    ops.update_running_statistics([_buffers(norm) for norm in norms], mean, var, count, norms[0].momentum)


def _buffers(norm: nn.BatchNorm1d) -> ops.RunningStatistics:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    return ops.RunningStatistics(norm.running_mean, norm.running_var, norm.num_batches_tracked)


def _sums(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the sums over batch and time of x and of its squares, (2, D), where mask is true."""
    valid = x if mask is None else x.masked_fill(~mask, 0)
    return torch.stack([valid.sum((0, 1)), valid.square().sum((0, 1))])


class SequenceBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` over batch and time of (B, L, D), with an optional mask and synchronised statistics."""

    def __init__(self, d_model: int, *, sync_stats: bool = False, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.sync_stats = sync_stats

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise x; positions where mask (B, L, 1) is false do not count in the statistics.

        On a CPU, values whose squares overflow in float32 are computed in float64 if there is a mask.
        """
        if not self.training or (mask is None and not self.sync_stats):
            return super().forward(x.flatten(0, 1)).view_as(x)
        wide = x.to(compute_dtype(x))
        sums = _sums(wide, mask)
        # processes have to agree on a dtype
        if not self.sync_stats and readable(sums) and not sums.isfinite().all():
            wide = x.double()
            sums = _sums(wide, mask)
        count = x.shape[0] * x.shape[1] if mask is None else mask.sum()
        mean, var, total = mean_and_variance(sums, count, self.sync_stats)
        update_running_statistics([self], mean.detach(), var.detach(), total)
        scale, shift = affine(self, mean, var)
        return (wide * scale + shift).to(x.dtype)
