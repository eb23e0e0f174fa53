"""Branches normalised by the statistics of some sequences, by Triton == the float64 reference."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import Algorithm, Selection, Taps

from ..conftest import randomise, training_step

pytest.importorskip("triton")
from .helpers import DEVICE, assert_same, double, inputs, masked_sum
from .test_toeplitz_branches import assert_same as assert_same_in_bfloat16
from .test_toeplitz_branches import problem


@pytest.mark.parametrize(
    ("algorithm", "lags"),
    [
        (Algorithm.SPECTRAL, [range(3), range(12), range(-1, -4, -1), range(-1, -70, -1)]),
        (Algorithm.TAPS, [(0, 1, 3), (0, 2, 40), (-1, -9)]),
    ],
)
@pytest.mark.parametrize(("L", "sequences", "masked", "skipped"), [(63, 1, True, False), (40, 2, False, True)])
def test_values_and_gradients(algorithm, lags, L, sequences, masked, skipped):
    u, lengths, mask = inputs(L, True, masked)

    def run(f, *others):
        def call(u, weight, *rest):
            taps = [Taps(*kernel) for kernel in zip(rest[: len(lags)], lags, strict=True)]
            return masked_sum(f, u, taps, weight, rest[len(lags) :], lengths, mask, sequences, *others)

        return call

    fast = run(ops.subsampled_branch_sum, Selection(algorithm, True), "triton")
    skip_and_beta = [double(5), double(len(lags), 5)] if skipped else []
    values = [double(5, len(at)) for at in lags]
    assert_same(fast, run(ops.branch_sum_reference), u, double(len(lags), 5), *values, *skip_and_beta)


@pytest.mark.parametrize(("sequences", "masked", "skip"), [(1, False, True), (3, True, False)])
def test_toeplitz_products(sequences, masked, skip):
    sizes = (2, 16, 140, 4, 130)
    assert_same_in_bfloat16(*problem(5, 2, 150, sizes, masked, skip), sizes, 3, sequences)


@pytest.mark.parametrize("kernel", ["fourier", "dilated"])
def test_a_layer_does_not_select_modes(kernel):
    exact = randomise(MRConv(3, 90, kernel=kernel, kernel_size=2, stats_fraction=0.5, dtype=torch.float64))
    layer = copy.deepcopy(exact).float().to(DEVICE)
    exact.backend, layer.backend = "reference", "triton"
    u = torch.randn(4, 80, 3)
    assert layer.explain(u.to(DEVICE)).algorithm not in (Algorithm.MOVING_SUM, Algorithm.MOVING_MODES)
    y, du, grads = training_step(layer, u.to(DEVICE))
    expected, expected_du, expected_grads = training_step(exact, u.double())
    largest = max(g.norm() for g in expected_grads.values())
    pairs = [(y, expected), (du, expected_du), *((g, expected_grads[name]) for name, g in grads.items())]
    assert all((a.double().cpu() - b).norm() < 1e-4 * largest for a, b in pairs)
