"""Finalising kernels == the plain torch path in float64: statistics, factors, gradients, running statistics."""

import pytest
import torch

from mrconv.ops import RunningStatistics, update_running_statistics
from mrconv.ops.branch_sum import normalization

from .helpers import DEVICE, double

pytest.importorskip("triton")
from mrconv.ops.branch_sum import normalization_triton

EPS, C = 1e-3, 35


def weights_of(branches, affine):
    """Return alpha, gamma and beta of each direction; gamma and beta are flat, as those of a BatchNorm."""
    return [
        normalization.BranchWeights(double(n, C), *([double(n * C), double(n * C)] if affine else ())) for n in branches
    ]


def heights_of(N, modes):
    values = {"none": None, "plain": double(N, C), "modes": double(N, C, 1, 2)}[modes]
    return None if values is None else normalization.Heights(values, [0.5 + i for i in range(N)])


def to_device(x):
    """Move all tensors of nested tuples to the device."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    if isinstance(x, list):
        return [to_device(y) for y in x]
    return type(x)(*map(to_device, x)) if isinstance(x, tuple) else x


def flattened(x):
    if isinstance(x, torch.Tensor) or x is None:
        return [x]
    return [y for each in x for y in flattened(each)]


def assert_equal(fast, exact):
    for a, b in zip(flattened(fast), flattened(exact), strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("branches", "affine", "modes", "P", "lengths"),
    [
        ((3,), True, "none", 1, None),
        ((2, 3), True, "none", 40, [7, 0, 300]),
        ((2, 1), False, "none", 3, None),
        ((3,), True, "modes", 600, [5] * 300),
        ((2,), False, "plain", 2, [0, 0]),
    ],
)
@pytest.mark.parametrize("skipped", [False, True])
def test_factors_equal_the_plain_path(branches, affine, modes, P, lengths, skipped):
    N, weights = sum(branches), weights_of(branches, affine)
    heights, skip = heights_of(N, modes), double(C) if skipped else None
    parts = double(P, 2, N, C)
    parts[:, 1] = parts[:, 0].square() + double(P, N, C).square()
    count = 500 if lengths is None else torch.tensor(lengths)
    arguments = weights, heights, EPS
    total = count if lengths is None else count.sum()
    exact = normalization.forward_factors(parts, total, *arguments, False, torch.float64)
    fast = normalization_triton.forward_factors(*map(to_device, (parts, count, *arguments)), torch.float64)
    assert_equal(fast, exact)

    parts = double(P, N + 2, C)
    means = torch.zeros(0) if exact.means is None else exact.means
    arguments = parts, exact.statistics, weights, skip, heights, means, EPS
    exact = normalization.backward_factors(*arguments, False, torch.float64)
    fast = normalization_triton.backward_factors(*map(to_device, arguments), torch.float64)
    assert_equal(fast, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_gradients_keep_their_precision(dtype):
    weights = [normalization.BranchWeights(*(x.to(DEVICE, dtype) for x in each)) for each in weights_of((2, 2), True)]
    parts = (double(5, 6, C) + 1e3).float().to(DEVICE)
    statistics = normalization.BatchStatistics(
        *(x.to(DEVICE).float() for x in (double(4, C), double(4, C).abs())), parts.new_tensor(9.0)
    )
    arguments = parts, statistics, weights, weights[0].alpha[0], None, parts.new_empty(0), EPS
    exact = normalization.backward_factors(*arguments, False, torch.float32)
    fast = normalization_triton.backward_factors(*arguments, torch.float32)
    for a, b in zip(flattened(fast), flattened(exact), strict=True):
        if b is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5 if b.dtype == torch.float32 else 2e-2, atol=1e-4)


@pytest.mark.parametrize("sizes", [(5,), (3000, 70)])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("count", [0, 1, 10])
def test_running_statistics_equal_those_of_torch(sizes, momentum, count):
    mean, var = double(sum(sizes)), double(sum(sizes)).square()
    initial = [RunningStatistics(double(n), double(n).square(), torch.tensor(3 + i)) for i, n in enumerate(sizes)]
    expected = [RunningStatistics(*(x.clone() for x in each)) for each in initial]
    unbiased = var * (count / max(count - 1, 1))
    for each, batch_mean, batch_var in zip(expected, mean.split(list(sizes)), unbiased.split(list(sizes)), strict=True):
        each.batches.add_(1)
        step = (1 / each.batches.item() if momentum is None else momentum) if count else 0.0
        each.mean.lerp_(batch_mean, step)
        each.var.lerp_(batch_var, step)
    running = to_device(initial)
    update_running_statistics(running, *map(to_device, (mean, var, torch.tensor(float(count)).double())), momentum)
    assert_equal(running, expected)
