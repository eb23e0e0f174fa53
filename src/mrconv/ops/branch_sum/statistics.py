"""Batch statistics from sums, in one process or over all processes."""

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
