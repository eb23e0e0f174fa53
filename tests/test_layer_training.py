"""Training with one convolution == N convolutions and N BatchNorms."""

import copy

import pytest
import torch

from mrconv import MRConv
from mrconv.kernels import kernel_class
from mrconv.norm import SequenceBatchNorm

from .conftest import randomise, relative, training_step

KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


def pair(**options):
    """Return a layer computed as one convolution, and its copy computed by the reference."""
    fast = randomise(MRConv(4, 100, dtype=torch.float64, **options))
    slow = copy.deepcopy(fast)
    slow.backend = "reference"
    return fast, slow


def assert_same_training(fast, slow, u, **kwargs):
    y, du, grads = training_step(fast, u, **kwargs)
    y_ref, du_ref, grads_ref = training_step(slow, u, **kwargs)
    assert relative(y, y_ref) < 1e-9
    largest = max(g.norm() for g in grads_ref.values())
    assert (du - du_ref).norm() < 1e-9 * largest
    for name, g in grads.items():
        assert (g - grads_ref[name]).norm() < 1e-9 * largest, name
    for (name, a), b in zip(fast.named_buffers(), slow.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel_size", [1, 3, 8])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_one_convolution_trains_like_n_branches(kind, kernel_size, bidirectional, masked):
    fast, slow = pair(kernel=kind, kernel_size=kernel_size, bidirectional=bidirectional)
    for L in (1, 2, 63, 100, 131):
        u = torch.randn(3, L, 4, dtype=torch.float64) + 0.5
        lengths = torch.tensor([L, 1, (L + 1) // 2]) if masked else None
        assert_same_training(fast, slow, u, lengths=lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (1, 2), (2, 4)])
def test_heads_and_groups_train_like_n_branches(kind, heads, groups):
    fast, slow = pair(kernel=kind, kernel_size=2, heads=heads, groups=groups, bidirectional=True)
    u = torch.randn(2, 63, 4, dtype=torch.float64)
    assert_same_training(fast, slow, u)
    assert_same_training(fast, slow, u, lengths=torch.tensor([63, 20]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"norm": "scale"}, {"norm": "none"}, {"combine": "concat"}])
def test_layers_without_branch_norm_train_like_n_branches(kind, options):
    fast, slow = pair(kernel=kind, kernel_size=4, bidirectional=True, **options)
    assert_same_training(fast, slow, torch.randn(2, 63, 4, dtype=torch.float64))


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_follow_batchnorm_over_many_steps(momentum):
    fast, slow = pair(kernel="fourier", kernel_size=2, momentum=momentum)
    for step in range(5):
        assert_same_training(fast, slow, torch.randn(3, 40 + step, 4, dtype=torch.float64))
    assert fast.branches[0].norm.num_batches_tracked == 5
    u = torch.randn(3, 50, 4, dtype=torch.float64)
    assert relative(fast.eval()(u), slow.eval()(u)) < 1e-12


def test_branch_outputs_are_normalised():
    layer = MRConv(4, 64, kernel_size=4, dtype=torch.float64)
    with torch.no_grad():
        layer.D.zero_()
        layer.branches[0].alpha.zero_()
        layer.branches[0].alpha[2] = 1
    y = layer(torch.randn(8, 64, 4, dtype=torch.float64) + 3)
    assert torch.allclose(y.mean((0, 1)), torch.zeros(4, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(y.var((0, 1), correction=0), torch.ones(4, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    layer = MRConv(2, 5, kernel=kind, kernel_size=2, bidirectional=True, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def run(u, *values):
        buffers = {name: b.clone() for name, b in layer.named_buffers()}
        return torch.func.functional_call(layer, (dict(zip(names, values, strict=True)), buffers), (u,))

    u = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (u, *layer.parameters()))


def test_float32_training_matches_float64():
    exact = randomise(MRConv(8, 1000, kernel_size=4, bidirectional=True, dtype=torch.float64))
    single = copy.deepcopy(exact).float()
    u = torch.randn(4, 1000, 8)
    y, du, grads = training_step(single, u)
    y64, du64, grads64 = training_step(exact, u.double())
    largest = max(g.norm() for g in grads64.values())
    assert relative(y.double(), y64) < 1e-5
    assert relative(du.double(), du64) < 1e-5
    for name, g in grads.items():
        assert (g.double() - grads64[name]).norm() < 1e-5 * largest, name


def test_one_resolution_has_neither_alpha_nor_batchnorm():
    for norm in ("batch", "scale", "none"):
        layer = MRConv(4, 32, kernel_size=32, kernel="dense", norm=norm)
        assert {name.rsplit(".")[-1] for name, _ in layer.named_parameters()} == {"taps", "D"}


def test_one_value_per_channel_cannot_be_normalised():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        MRConv(4, 32)(torch.randn(1, 1, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("l_max", "norm", "scale"), [(64, "batch", 1 / 8), (64, "scale", 1), (4, "batch", 1)])
def test_kernels_before_a_batch_norm_start_smaller(kind, l_max, norm, scale):
    torch.manual_seed(0)
    layer = MRConv(16, l_max, kernel=kind, kernel_size=4, norm=norm, seed=3)
    for reset in (False, True):
        if reset:
            layer.reset_parameters()
        torch.manual_seed(0)
        kernel = kernel_class(kind)(16, layer.directions[0].kernel.lengths, 4, seed=3)
        if not reset:
            for a, b in zip(layer.directions[0].kernel.parameters(), kernel.parameters(), strict=True):
                assert torch.equal(a, b * scale)
        largest = max(p.abs().max() for p in layer.directions[0].kernel.parameters())
        assert largest < scale * 6  # six standard deviations, or the constant beta


def test_the_scale_of_kernels_before_a_batch_norm_has_no_influence():
    u = torch.randn(3, 50, 4, dtype=torch.float64)
    layer, larger = (MRConv(4, 64, kernel="dilated", kernel_size=4, eps=1e-30, dtype=torch.float64) for _ in range(2))
    larger.load_state_dict(layer.state_dict())
    with torch.no_grad():
        larger.directions[0].kernel.taps.mul_(8)
    assert relative(larger(u), layer(u)) < 1e-9


@pytest.mark.parametrize("kind", ["fourier", "dilated"])
@pytest.mark.parametrize("masked", [False, True])
def test_float32_training_on_inputs_of_1e18_equals_float64(kind, masked):
    exact = randomise(MRConv(4, 100, kernel=kind, kernel_size=4, bidirectional=True, dtype=torch.float64))
    with torch.no_grad():
        exact.D.zero_()
    layer = copy.deepcopy(exact).float()
    u = 1e18 * torch.randn(3, 250, 4, dtype=torch.float64)
    options = {"lengths": torch.tensor([250, 9, 130])} if masked else {}
    y, du, grads = training_step(layer, u.float(), **options)
    y_exact, du_exact, grads_exact = training_step(exact, u.float().double(), **options)
    assert relative(y, y_exact) < 1e-5
    assert relative(du.double(), du_exact) < 1e-4
    largest = max(g.norm() for name, g in grads_exact.items() if name != "D")
    assert all((g - grads_exact[name]).norm() < 1e-5 * largest for name, g in grads.items() if name != "D")
    assert all(torch.allclose(a.double(), b.double()) for a, b in zip(layer.buffers(), exact.buffers(), strict=True))


def test_a_masked_batch_norm_of_values_of_1e18_equals_float64():
    x, norm = 1e18 * torch.randn(3, 200, 4), SequenceBatchNorm(4)
    exact = torch.nn.BatchNorm1d(4, dtype=torch.float64)
    y = norm(x, torch.ones(3, 200, 1, dtype=torch.bool))
    assert relative(y.flatten(0, 1), exact(x.flatten(0, 1).double())) < 1e-5
    assert torch.allclose(norm.running_var.double(), exact.running_var)
