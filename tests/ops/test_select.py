"""The selection of an algorithm from costs, and one selection per forward pass."""

import pytest
import torch

from mrconv import MRConv
from mrconv.ops import Algorithm, BranchShape, select
from mrconv.ops.select import Problem, cost, select_branch_sum, select_conv

U = torch.zeros(1, 4, 1)


@pytest.fixture
def _triton(monkeypatch):
    monkeypatch.setattr(select, "use_triton", lambda u, backend: True)


def set_costs(monkeypatch, **costs):
    monkeypatch.setattr(select, "cost", lambda u, triton, algorithm, problem: costs[algorithm])


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize(
    ("dtype", "costs", "algorithm"),
    [
        (torch.float32, {"spectral": 1.0, "moving_modes": 1.0}, Algorithm.MOVING_MODES),
        (torch.float32, {"spectral": 1.0, "moving_modes": 1.01}, Algorithm.SPECTRAL),
        (torch.bfloat16, {"spectral": 2.0, "toeplitz": 1.0, "moving_modes": 1.0}, Algorithm.MOVING_MODES),
        (torch.bfloat16, {"spectral": 2.0, "toeplitz": 1.0, "moving_modes": 1.01}, Algorithm.TOEPLITZ),
    ],
)
def test_moving_modes_run_where_they_cost_no_more(monkeypatch, dtype, costs, algorithm):
    set_costs(monkeypatch, **costs)
    selection = select_branch_sum(U.to(dtype), [BranchShape(range(n), n, modes=2) for n in (2, 4, 8)])
    assert selection.algorithm is algorithm
    assert selection.costs == costs


@pytest.mark.usefixtures("_triton")
def test_toeplitz_products_take_bfloat16_and_several_values_per_channel():
    dense = [BranchShape(range(n), n) for n in (2, 4, 8)]
    assert Algorithm.TOEPLITZ in select_branch_sum(U.bfloat16(), dense).costs
    assert Algorithm.TOEPLITZ not in select_branch_sum(U.half(), dense).costs
    assert Algorithm.TOEPLITZ not in select_branch_sum(U.bfloat16(), [BranchShape(range(1), 1), *dense]).costs


@pytest.mark.usefixtures("_triton")
def test_moving_sums_take_constant_causal_kernels():
    causal, anticausal = BranchShape(range(8), 1), BranchShape(range(-1, -9, -1), 1)
    assert set(select_branch_sum(U, [causal] * 3).costs) == {Algorithm.MOVING_SUM, Algorithm.SPECTRAL}
    assert set(select_branch_sum(U, [causal, anticausal]).costs) == {Algorithm.SPECTRAL}


def test_both_directions_cost_more_except_for_taps():
    one, both = Problem("branch_sum", 1024, 8), Problem("bidirectional_branch_sum", 1024, 8)
    assert cost(U, False, Algorithm.SPECTRAL, both) > 1.5 * cost(U, False, Algorithm.SPECTRAL, one)
    assert cost(U, False, Algorithm.TAPS, both) == cost(U, False, Algorithm.TAPS, one)


def test_costs_are_interpolated_and_extrapolated():
    problems = [Problem("conv", reach) for reach in (100, 256, 500, 1024, 10**6)]
    short, first, between, second, long = (cost(U, False, Algorithm.FFT, problem) for problem in problems)
    assert short == first
    assert min(first, second) < between < max(first, second)
    assert long == cost(U, False, Algorithm.FFT, Problem("conv", 65536))
    toeplitz = [cost(U.half(), True, Algorithm.TOEPLITZ, Problem("conv", reach)) for reach in (16384, 32768)]
    assert toeplitz[1] == 2 * toeplitz[0]
    assert cost(U.double(), False, Algorithm.TOEPLITZ, Problem("conv", 256)) == float("inf")


@pytest.mark.parametrize("kind", ["fourier", "dilated"])
@pytest.mark.parametrize("mode", ["training", "eval", "merged"])
def test_a_forward_pass_selects_once_and_explain_reports_it(monkeypatch, kind, mode):
    layer = MRConv(4, 32, kernel=kind, kernel_size=2).train(mode == "training")
    layer = layer.reparameterize() if mode == "merged" else layer
    u, calls = torch.randn(2, 40, 4), []
    cheapest = select._cheapest
    monkeypatch.setattr(select, "_cheapest", lambda *args: calls.append(cheapest(*args)) or calls[-1])
    layer(u)
    assert len(calls) == 1
    assert layer.explain(u) == calls[0]


def test_an_empty_dense_kernel_raises():
    with pytest.raises(ValueError, match="needs at least one lag"):
        select_conv(torch.zeros(1, 1, 4), range(0))
