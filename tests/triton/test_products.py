"""Correlations and branch sums by products of matrices == the float64 reference, in float32 and half precision."""

import pytest
import torch

from mrconv import ops
from mrconv.ops.correlation_triton import BLOCK, correlation

from ..conftest import gradients, relative
from .test_spectra import BRANCHES
from .test_triton import DEVICE, _poison, double, inputs  # noqa: F401

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def from_zero(lags):
    """Split branches into those that look back and those that look ahead."""
    return next((i for i, at in enumerate(lags) if at[0] < 0), len(lags))


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


@pytest.mark.parametrize("lags", BRANCHES, ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("masked", "channels_last", "skipped"), [(False, True, True), (True, False, False)])
@pytest.mark.parametrize(
    ("dtype", "L"), [*((torch.float32, L) for L in (1, 63, 130)), (torch.bfloat16, 130), (torch.float16, 63)]
)
def test_branch_sum(L, lags, masked, channels_last, skipped, dtype):
    u, lengths, mask = inputs(L, channels_last, masked)
    u, forwards = u.to(dtype).double(), from_zero(lags)
    tensors = [u, double(len(lags), 5), *(double(5, len(at)) for at in lags), *([double(5)] * 2 if skipped else [])]

    def call(u, weight, *rest, plain):
        kernels, skip = rest[: len(lags)], rest[len(lags) :] or (None, None)
        if plain:
            y, *_ = ops.branch_sum_reference(u * mask, list(zip(kernels, lags, strict=True)), weight, *skip, lengths)
            return y * mask
        here, ends = mask.to(u.device), None if lengths is None else lengths.to(u.device)
        y, *_ = ops.product_branch_sum(u * here, kernels[:forwards], kernels[forwards:], weight, *skip, ends)
        return (y * here).float()

    expected, expected_grads = gradients(lambda *x: call(*x, plain=True), *tensors)
    first = tensors[0].to(DEVICE, dtype)
    y, grads = gradients(lambda *x: call(*x, plain=False), first, *(x.float().to(DEVICE) for x in tensors[1:]))
    largest = max(g.norm() for g in expected_grads)
    tolerance = TOLERANCE[dtype] * (1 if L > 2 else 50)  # variances of a few numbers are small differences
    assert relative(y.double().cpu(), expected) < tolerance
    for g, e in zip(grads, expected_grads, strict=True):
        assert (g.double().cpu() - e).norm() < tolerance * torch.maximum(e.norm(), 0.1 * largest)


def test_float64_is_refused():
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        ops.product_branch_sum(double(1, 2, 3), [double(2, 3)], [], double(1, 2))


def test_op_is_registered_correctly():
    u, kernel = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3, 9), (3, 7)))
    weight, skip = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3), (3,)))
    arguments = (u, kernel, weight, skip, skip, None, [3, 4], 1, 1e-5, False, "products")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mrconv.branch_sum.default, arguments, test_utils=checks)
