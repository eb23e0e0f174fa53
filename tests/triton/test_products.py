"""Correlations and branch sums by products of matrices == the float64 reference, in float32 and half precision."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import costs
from mrconv.ops.correlation_triton import BLOCK, correlation

from ..conftest import gradients, randomise, relative, training_step
from .test_spectra import BRANCHES
from .test_triton import DEVICE, _poison, double, inputs  # noqa: F401

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(
    ("B", "blocks", "low", "high"), [(1, 1, 0, 1), (3, 2, -70, 90), (2, 3, -191, 192), (5, 1, 5, 9)]
)
def test_correlation(B, blocks, low, high):
    p, q = (torch.randn(B, 3, blocks * BLOCK, device=DEVICE) for _ in range(2))
    found = correlation(p, q, low, high)
    padded = torch.nn.functional.pad(q.double(), (p.shape[-1], p.shape[-1]))
    for lag, column in zip(range(low, high), found.T, strict=True):
        moved = padded[..., p.shape[-1] - lag : 2 * p.shape[-1] - lag]
        assert (column - (p.double() * moved).sum((0, 2))).abs().max() < 1e-3


def split(lags):
    """Tell how many branches look back; the others look ahead."""
    return next((i for i, at in enumerate(lags) if at[0] < 0), len(lags))


AHEAD = [range(-1, -3, -1), range(-1, -200, -1)]
CASES = [(torch.float32, 1, 3), (torch.float32, 63, 1), (torch.float32, 130, 3), (torch.bfloat16, 130, 3)]


@pytest.mark.parametrize("lags", [*BRANCHES, AHEAD], ids=["causal", "bidirectional", "ahead"])
@pytest.mark.parametrize(("dtype", "L", "B"), CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_branch_sum(lags, dtype, L, B, channels_last):
    u, *_ = inputs(L, channels_last, False, B)
    u = (u + 1).to(dtype).double()
    skip = [double(5), double(5)] if channels_last else []  # and bias
    tensors = [u, double(len(lags), 5), *(double(5, len(at)) for at in lags), *skip]
    statistics = []

    def call(u, weight, *rest):
        kernels, skip = rest[: len(lags)], rest[len(lags) :] or (None, None)
        if u.dtype == torch.float64:
            y, *found = ops.branch_sum_reference(u, list(zip(kernels, lags, strict=True)), weight, *skip)
        else:
            y, *found = ops.product_branch_sum(u, kernels[: split(lags)], kernels[split(lags) :], weight, *skip)
        statistics.append([x.double().cpu() for x in found])
        return y.double()

    expected, expected_grads = gradients(call, *tensors)
    y, grads = gradients(call, tensors[0].to(DEVICE, dtype), *(x.float().to(DEVICE) for x in tensors[1:]))
    (mean, var, count), (own_mean, own_var, own_count) = statistics
    assert own_count == count
    assert (own_mean - mean).abs().max() < 1e-5 * var.sqrt().max().clamp(min=1)
    assert (own_var - var).abs().max() < 5e-5 * var.max() + 1e-12
    tolerance = TOLERANCE[dtype] * (1 if L > 2 else 50)  # variances of a few numbers are small differences
    largest = max(g.norm() for g in expected_grads)
    assert (y.cpu() - expected).norm() < tolerance * expected.norm().clamp(min=1e-3)  # 0 where nothing lies ahead
    for g, e in zip(grads, expected_grads, strict=True):
        assert (g.double().cpu() - e).norm() < tolerance * torch.maximum(e.norm(), 0.1 * largest).clamp(min=1e-3)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layer_chooses_it_where_it_is_cheapest(bidirectional, monkeypatch):
    for name in ("products", "products both ways"):
        monkeypatch.setitem(costs.TABLE["triton"]["float32"], name, {"256": 1e-3})
    layer = randomise(MRConv(3, 70, kernel="fourier", kernel_size=16, bidirectional=bidirectional, dtype=torch.float64))
    own, u = copy.deepcopy(layer).float().to(DEVICE), double(2, 70, 3)
    assert own.choice(u.float().to(DEVICE)).op == "products" + " both ways" * bidirectional
    y, du, grads = training_step(layer, u)
    z, dz, own_grads = training_step(own, u.float().to(DEVICE))
    assert relative(z.double().cpu(), y) < 1e-5
    assert relative(dz.double().cpu(), du) < 1e-4
    for name, g in grads.items():
        assert (own_grads[name].double().cpu() - g).norm() < 1e-4 * max(x.norm() for x in grads.values()), name
    lengths = torch.tensor([70, 3])
    y, z = layer(u, lengths=lengths), own(u.float().to(DEVICE), lengths=lengths)  # padded, it is another op's
    assert relative(z.double().cpu(), y) < 1e-5


@pytest.mark.parametrize(("dtype", "of_kernels"), [(torch.float64, torch.float64), (torch.float32, torch.float64)])
def test_float64_is_refused(dtype, of_kernels):
    with pytest.raises(TypeError, match="float32 or bfloat16 and kernels up to float32"):
        ops.product_branch_sum(double(1, 2, 3).to(dtype), [double(2, 3).to(of_kernels)], [], double(1, 2))


def test_op_is_registered_correctly():
    u, kernel = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3, 9), (3, 7)))
    weight, skip = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3), (3,)))
    arguments = (u, kernel, weight, skip, skip, None, [3, 4], 1, 1e-5, False, "products")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mrconv.dense_branch_sum.default, arguments, test_utils=checks)
