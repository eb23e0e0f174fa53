"""Mean and variance from sums, of one process or of all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverProcesses.forward(ctx, grad)


def sum_over_processes(x: Tensor) -> Tensor:
    """Add up x over all processes of `torch.distributed`, differentiably; x itself where there is one process."""
    if dist.is_available() and dist.is_initialized():
        return _SumOverProcesses.apply(x)
    return x


def running_total(x: Tensor) -> Tensor:
    """Cumulative sum over the last axis; by doubling where torch's own would break a promise of determinism."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    return _total_by_doubling(x)


def _total_by_doubling(x: Tensor) -> Tensor:
    step = 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] + x[..., :-step]], -1)
        step *= 2
    return x


def valid_count(u: Tensor, lengths: Tensor | None) -> Tensor | int:
    """Return how many positions of u (B, C, L) count: all, or the first `lengths` of each sequence."""
    return u.shape[0] * u.shape[2] if lengths is None else lengths.sum()


def mean_and_variance(sums: Tensor, count: Tensor | int, sync: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance from sums[0] (of values) and sums[1] (of squares) over `count` elements.

    With `sync`, sums and count are added up over all processes first. Returns the total count too.
    """
    total = count.to(sums.dtype) if isinstance(count, Tensor) else sums.new_full((), count)
    if sync:
        packed = sum_over_processes(torch.cat([sums.flatten(), total.reshape(1)]))
        sums, total = packed[:-1].view_as(sums), packed[-1].detach()
    mean, square = (sums / total.clamp(min=1)).unbind(0)
    return mean, (square - mean.square()).clamp(min=0), total


def shifted(bias: Tensor | None, scale: Tensor, mean: Tensor) -> Tensor:
    """Return what is left to add, (C,), once branches (N, C) are scaled but not centred."""
    shift = -(scale * mean).sum(0)
    return shift if bias is None else shift + bias


def normalised_backward(
    inner: Tensor, g_sum: Tensor, weight: Tensor, mean: Tensor, var: Tensor, count: Tensor, eps: float, sync: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dweight and the (s, q, a) of dc_b = s_b g - a_b - q_b c_b.

    That is for y = sum_b weight_b (c_b - mean_b) / sqrt(var_b + eps); g is the output's gradient, inner_b the sum of
    g c_b (nb, C) and g_sum that of g (C,), both of this process.
    """
    rstd, count = torch.rsqrt(var + eps), count.clamp(min=1)
    dweight = rstd * (inner - mean * g_sum)
    total, g_total = dweight, g_sum
    if sync:
        both = sum_over_processes(torch.cat([dweight, g_sum[None]]))
        total, g_total = both[:-1], both[-1]
    s = weight * rstd
    q = s * rstd * total / count
    return dweight, s, q, s * g_total / count - q * mean
