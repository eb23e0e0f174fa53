"""Convolution with constant kernels as moving sums == the float64 reference."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import Algorithm, select

from ..conftest import randomise, relative
from .helpers import DEVICE

pytest.importorskip("triton")
WIDTHS = [(1,), (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 100), (1, 2, 64, 200)]


def arguments(L, widths, dtype, channels_last=True, skipped=True):
    wide = ops.compute_dtype(torch.empty(0, dtype=dtype))
    u = 0.5 + torch.randn(2, L, 33, device=DEVICE, dtype=torch.float64)
    u = u.to(dtype).transpose(1, 2)
    values = torch.randn(len(widths), 33, 1, 2, device=DEVICE, dtype=wide)
    skip, bias = torch.randn(2, 33, device=DEVICE, dtype=wide)
    factors = [width**-0.5 for width in widths]
    return u if channels_last else u.contiguous(), values, factors, list(widths), skip if skipped else None, bias


def exact(u, values, factors, widths, skip, bias, gelu):
    doubled = [x if x is None else x.double() for x in (u, values, skip, bias)]
    return ops.moving_sum_conv_reference(*doubled[:2], factors, widths, *doubled[2:], gelu)


@pytest.mark.parametrize("L", [1, 63, 64, 100, 300])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("channels_last", "skipped", "gelu"), [(True, True, True), (False, False, False)])
def test_moving_sums_equal_the_reference(L, widths, dtype, limit, channels_last, skipped, gelu):
    given = arguments(L, widths, dtype, channels_last, skipped)
    y = ops.moving_sum_conv(*given, gelu)
    assert y.stride() == torch.empty_like(given[0]).stride()
    assert relative(y.double(), exact(*given, gelu)) < limit


def test_float32_is_accurate_far_from_zero():
    u, *rest = arguments(600, WIDTHS[1], torch.float32)
    u = u + 100
    assert relative(ops.moving_sum_conv(u, *rest, False).double(), exact(u, *rest, False)) < 1e-6


def test_the_op_is_registered_correctly():
    given = arguments(70, WIDTHS[2], torch.float32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.mrconv.moving_sum_conv, (*given, True), test_utils=checks)
    empty = torch.empty(0, 33, 7, device=DEVICE)
    assert ops.moving_sum_conv(empty, *given[1:]).shape == empty.shape


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_a_merged_layer_runs_as_moving_sums_without_gradients(heads, groups, rate, monkeypatch):
    monkeypatch.setattr(select, "cost", lambda u, triton, algorithm, problem: algorithm is not Algorithm.MOVING_SUM)
    layer = MRConv(6, 160, heads=heads, groups=groups, backend="torch", device=DEVICE, dtype=torch.float64)
    branches = randomise(layer).eval()
    merged = copy.deepcopy(branches).reparameterize(rate)
    merged.backend = "auto"
    u, lengths = torch.randn(2, 140, 6, device=DEVICE, dtype=torch.float64), torch.tensor([140, 33])
    with torch.no_grad():
        assert merged.explain(u).algorithm is Algorithm.MOVING_SUM
        assert relative(merged(u, gelu=True), branches(u, rate=rate, gelu=True)) < 1e-12
        assert relative(merged(u, lengths), branches(u, lengths, rate)) < 1e-12
    assert merged.explain(u).algorithm is not Algorithm.MOVING_SUM
    merged.backend = "torch"
    assert relative(merged(u), branches(u, rate=rate)) < 1e-12
    both = MRConv(6, 160, bidirectional=True, backend="torch", merged=True)
    with torch.no_grad():
        assert both.explain(u).algorithm is not Algorithm.MOVING_SUM
