"""Statistics of some sequences of a batch, by which all are normalised."""

import copy

import pytest
import torch

from mrconv import MRConv, SequenceClassifier, TwoTowerClassifier, ops
from mrconv.ops import BranchWeights, ConstantKernels, Normalization, Taps, select
from mrconv.ops.branch_sum.op import branch_sum_with_factors, select_for

from .conftest import randomise
from .ops.test_ops import DENSE, SCATTERED, assert_same, costs_more, double
from .test_layer_training import KINDS, assert_same_training


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("lags", [*DENSE, *SCATTERED], ids=lambda x: f"{len(x)}x{type(x[0]).__name__}")
@pytest.mark.parametrize("L", [1, 63, 100])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("expensive", ["taps", "spectral"])
def test_branches_normalised_by_some_sequences(sequences, lags, L, masked, skipped, expensive, monkeypatch):
    monkeypatch.setattr(select, "cost", costs_more(expensive))
    others = [double(4), double(len(lags), 4), double(len(lags), 4)] if skipped else []
    lengths = torch.tensor([L, 1, (L + 1) // 2, L]) if masked else None
    mask = torch.arange(L) < (torch.tensor([L] * 4) if lengths is None else lengths)[:, None]

    def run(f):
        def call(u, weight, *rest):
            taps = [Taps(*kernel) for kernel in zip(rest[: len(lags)], lags, strict=True)]
            skip, gamma, beta = rest[len(lags) :] or (None, None, None)
            normalization = Normalization([BranchWeights(weight, gamma, beta)], skip, lengths, eps=0.01)
            y, *moments = f(u * mask[:, None], taps, normalization, sequences)
            statistics.append(moments)
            return y * mask[:, None]

        return call

    statistics = []
    tensors = double(4, 4, L) + 0.3, double(len(lags), 4), *(double(4, len(at)) for at in lags), *others
    assert_same(run(ops.subsampled_branch_sum), run(ops.branch_sum_reference), *tensors, tolerance=1e-9)
    for fast, reference in zip(*statistics, strict=True):
        assert torch.allclose(fast, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("factor", ["scale", "bias"])
def test_each_factor_has_gradients_of_its_own(factor):
    lags, normalization = DENSE[0], Normalization(double(len(DENSE[0]), 4))

    def fast(u, *values):
        taps = [Taps(*kernel) for kernel in zip(values, lags, strict=True)]
        return getattr(branch_sum_with_factors(u, taps, normalization, select_for(u, taps, "auto"))[1], factor)

    def reference(u, *values):
        taps = [Taps(*kernel) for kernel in zip(values, lags, strict=True)]
        _, mean, var, _ = ops.branch_sum_reference(u, taps, normalization)
        scale = normalization.weights * torch.rsqrt(var + normalization.eps)
        return scale if factor == "scale" else (-scale * mean).sum(0)

    assert_same(fast, reference, double(3, 4, 40) + 0.3, *(double(4, len(at)) for at in lags), tolerance=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("fraction", [0.01, 0.5])
def test_a_layer_trains_like_n_branches_with_the_statistics_of_some(
    kind, bidirectional, masked, heads, groups, fraction
):
    options = {"kernel_size": 4, "heads": heads, "groups": groups, "bidirectional": bidirectional}
    fast = randomise(MRConv(4, 100, kernel=kind, stats_fraction=fraction, dtype=torch.float64, **options))
    slow = copy.deepcopy(fast)
    slow.backend = "reference"
    for L in (2, 63, 131):
        u = torch.randn(5, L, 4, dtype=torch.float64) + 0.5
        assert_same_training(fast, slow, u, lengths=torch.tensor([L, 1, 2, L, 1]) if masked else None)


def test_the_first_sequences_rounded_up_give_the_statistics():
    layer = MRConv(4, 32, kernel_size=4, stats_fraction=0.3, momentum=1.0, dtype=torch.float64)
    u = torch.randn(5, 32, 4, dtype=torch.float64)
    layer(u)
    some = [x.clone() for x in layer.buffers()]
    u[2:] *= 1e3
    layer(u)
    assert all(torch.allclose(a, b) for a, b in zip(layer.buffers(), some, strict=True) if a.ndim)
    u[1] *= 2
    layer(u)
    assert not any(torch.allclose(a, b) for a, b in zip(layer.buffers(), some, strict=True) if a.ndim)


def test_all_sequences_are_the_default_and_a_model_takes_the_option():
    torch.manual_seed(0)
    model = SequenceClassifier(n_classes=2, d_input=3, d_model=8, depth=1, l_max=64, kernel_size=4, stats_fraction=0.5)
    layer = model.backbone.blocks[0].layer
    assert (layer.stats_fraction, MRConv(4, 32).stats_fraction) == (0.5, 1.0)
    u = torch.randn(4, 64, 3)
    some = model(u)
    layer.stats_fraction = 1.0
    assert not torch.allclose(some, model(u))


def test_invalid_uses_raise():
    for fraction in (0, -0.5, 1.5, float("nan"), "half"):
        with pytest.raises(ValueError, match=r"stats_fraction must be a number in \(0, 1\]; got "):
            MRConv(4, 32, stats_fraction=fraction)
    with pytest.raises(ValueError, match=r"stats_fraction=0.5 needs norm='batch'; got norm='scale'"):
        MRConv(4, 32, kernel_size=4, norm="scale", stats_fraction=0.5)
    with pytest.raises(ValueError, match=r"needs kernels that are not constant.*kernel_size=1"):
        MRConv(4, 32, kernel_size=1, stats_fraction=0.5)
    with pytest.raises(ValueError, match="got 1 of 3 sequences counted by stats_fraction and length 1"):
        MRConv(4, 32, kernel_size=4, stats_fraction=0.1)(torch.randn(3, 1, 4))
    kernels = ConstantKernels(torch.ones(1, 2), [1.0], [3])
    with pytest.raises(TypeError, match="takes taps or packed kernels; got ConstantKernels"):
        ops.subsampled_branch_sum(torch.ones(2, 2, 5), kernels, Normalization(torch.ones(1, 2)), 1)
    taps, moving = [Taps(torch.ones(2, 3), range(3))], ops.Selection(ops.Algorithm.MOVING_SUM)
    with pytest.raises(TypeError, match="MOVING_SUM has no factors of the branches"):
        ops.subsampled_branch_sum(torch.ones(2, 2, 5), taps, Normalization(torch.ones(1, 2)), 1, moving)
    for sequences in (0, 2, 3):
        with pytest.raises(ValueError, match=f"sequences must be from 1 to 1, less than the batch; got {sequences}"):
            ops.subsampled_branch_sum(torch.ones(2, 2, 5), taps, Normalization(torch.ones(1, 2)), sequences)


@pytest.mark.parametrize(("fraction", "batch", "counted"), [(0.07, 100, 7), (0.14, 50, 7), (0.3, 5, 2), (0.01, 3, 1)])
def test_the_number_of_sequences_is_rounded_up_once(fraction, batch, counted, monkeypatch):
    seen = []
    subsampled = ops.subsampled_branch_sum
    monkeypatch.setattr(ops, "subsampled_branch_sum", lambda *given: seen.append(given[3]) or subsampled(*given))
    MRConv(2, 8, kernel_size=2, stats_fraction=fraction)(torch.randn(batch, 8, 2))
    assert seen == [counted]


def test_both_sides_of_a_pair_give_statistics():
    model = TwoTowerClassifier(
        n_classes=2, d_input=1, d_model=4, depth=1, l_max=16, kernel_size=4, stats_fraction=0.5, momentum=1.0
    )
    first, second = torch.randn(4, 16, 1), torch.randn(4, 16, 1)
    model(first, second)
    before = model.backbone.blocks[0].layer.branches[0].norm.running_var.clone()
    model(first, 5 * second)
    assert not torch.allclose(model.backbone.blocks[0].layer.branches[0].norm.running_var, before, rtol=1e-3)


def test_a_compiled_layer_takes_any_batch():
    layer = MRConv(4, 64, kernel_size=4, stats_fraction=0.5, bidirectional=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((4, 64), (5, 50), (3, 33)):
        u = torch.randn(batch, length, 4, requires_grad=True)
        y = compiled(u)
        (du,) = torch.autograd.grad(y.square().sum(), u)
        expected = layer(u)
        assert torch.equal(y, expected)
        assert torch.equal(du, torch.autograd.grad(expected.square().sum(), u)[0])
