"""The update of running statistics: exponential or cumulative averages of batch statistics, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._common import use_triton
from .._registration import eager_op


class RunningStatistics(NamedTuple):
    """The buffers of a BatchNorm: mean and unbiased variance, and the number of batches they come from."""

    mean: Tensor
    var: Tensor
    batches: Tensor


@torch.no_grad()
def update_running_statistics(
    running: Sequence[RunningStatistics], mean: Tensor, var: Tensor, count: Tensor, momentum: float | None
) -> None:
    """Update one or two BatchNorms as `nn.BatchNorm1d` does, from mean and biased var over `count` values.

    The elements of mean and var are those of the first BatchNorm, then those of the second. Without momentum the
    statistics are averages over all batches. An empty batch changes nothing but the number of batches.
    """
    if use_triton(mean, "auto") and all(x.is_contiguous() for each in running for x in each):
        buffers = (*(x for each in running for x in each), None, None, None)[:6]
        _update(mean.contiguous(), var.contiguous(), count, *buffers, momentum)
        return
    sizes = [each.mean.numel() for each in running]
    parts = zip(running, mean.flatten().split(sizes), var.flatten().split(sizes), strict=True)
    for buffers, batch_mean, batch_var in parts:
        _update_one(buffers, batch_mean, batch_var, count, momentum)


def _update_one(running: RunningStatistics, mean: Tensor, var: Tensor, count: Tensor, momentum: float | None) -> None:
    running.batches.add_(1)
    step = running.batches.to(mean.dtype).reciprocal() if momentum is None else momentum
    step = step * (count > 0).to(mean.dtype)
    unbiased = var * (count / (count - 1).clamp(min=1))
    for buffer, new in ((running.mean, mean), (running.var, unbiased)):
        buffer.copy_(buffer + step * (new - buffer))


@eager_op(
    "update_running_statistics",
    mutates_args=("mean1", "var1", "batches1", "mean2", "var2", "batches2"),
    schema="(Tensor mean, Tensor var, Tensor count, Tensor(a!) mean1, Tensor(b!) var1, Tensor(c!) batches1, "
    "Tensor(d!)? mean2, Tensor(e!)? var2, Tensor(f!)? batches2, float? momentum) -> ()",
)
def _update(  # type: ignore[no-untyped-def]
    mean, var, count, mean1, var1, batches1, mean2, var2, batches2, momentum
):
    from .normalization_triton import update_running_statistics

    update_running_statistics(mean, var, count, (mean1, var1, batches1, mean2, var2, batches2), momentum)


@_update.register_fake
def _(*arguments) -> None:  # type: ignore[no-untyped-def]
    return None
