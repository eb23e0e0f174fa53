"""Batch statistics from sums, in one process or over all processes, and their part of the backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class BatchStatistics(NamedTuple):
    """Mean and biased variance over `num_values` values."""

    mean: Tensor
    var: Tensor
    num_values: Tensor


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
    """Sum x over all processes of `torch.distributed`, differentiably; return x itself without `torch.distributed`."""
    if dist.is_available() and dist.is_initialized():
        return _SumOverProcesses.apply(x)
    return x


def cumulative_sum(x: Tensor) -> Tensor:
    """Return the cumulative sum over the last axis, also if deterministic algorithms are required on a GPU."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    return cumulative_sum_by_doubling(x)


def cumulative_sum_by_doubling(x: Tensor) -> Tensor:
    """Return the cumulative sum over the last axis in log2(length) additions, which are deterministic."""
    step = 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] + x[..., :-step]], -1)
        step *= 2
    return x


def valid_count(u: Tensor, lengths: Tensor | None) -> Tensor | int:
    """Return the number of valid positions of u (B, C, L): all, or the first `lengths` of each sequence."""
    return u.shape[0] * u.shape[2] if lengths is None else lengths.sum()


def mean_and_variance(sums: Tensor, count: Tensor | int, sync: bool = False) -> BatchStatistics:
    """Return mean and biased variance from sums[0] (of values) and sums[1] (of squares) over `count` values.

    With `sync`, sums and count are first summed over all processes.
    """
    total = count.to(sums.dtype) if isinstance(count, Tensor) else sums.new_full((), count)
    if sync:
        packed = sum_over_processes(torch.cat([sums.flatten(), total.reshape(1)]))
        sums, total = packed[:-1].view_as(sums), packed[-1].detach()
    mean, square = (sums / total.clamp(min=1)).unbind(0)
    return BatchStatistics(mean, (square - mean.square()).clamp(min=0), total)


def centring_shift(bias: Tensor | None, scale: Tensor, mean: Tensor) -> Tensor:
    """Return the constant (C,) to add to branches (N, C) that are scaled but not centred: bias - sum scale * mean."""
    shift = -(scale * mean).sum(0)
    return shift if bias is None else shift + bias


def normalization_backward(
    inner: Tensor, g_sum: Tensor, weight: Tensor, statistics: BatchStatistics, eps: float, sync: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dweight and the s, q, a (N, C) of the branches' gradients dc_b = s_b g - a_b - q_b c_b.

    That is the backward of y = sum_b weight_b (c_b - mean_b) / sqrt(var_b + eps) with g the gradient of y. inner_b is
    the sum of g c_b, (N, C), and g_sum the sum of g, (C,), both of this process.
    """
    mean, var, count = statistics
    rstd, count = torch.rsqrt(var + eps), count.clamp(min=1)
    dweight = rstd * (inner - mean * g_sum)
    total, g_total = dweight, g_sum
    if sync:
        both = sum_over_processes(torch.cat([dweight, g_sum[None]]))
        total, g_total = both[:-1], both[-1]
    s = weight * rstd
    q = s * rstd * total / count
    return dweight, s, q, s * g_total / count - q * mean
