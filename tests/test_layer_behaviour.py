"""Causality, shifts, lengths, rates, decay, heads and groups of the layer."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.kernels import resampled

from .conftest import randomise, relative, training_step

KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def build(d_model=4, l_max=64, **options):
    return randomise(MRConv(d_model, l_max, dtype=torch.float64, **({"kernel_size": 4} | options))).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_output_depends_on_the_past_only(kind, combine):
    layer = build(kernel=kind, combine=combine)
    u = double(1, 100, 4)
    changed = u.clone()
    changed[:, 60:] += 1
    difference = (layer(u) - layer(changed)).abs().amax((0, 2))
    assert difference[:60].max() < 1e-12
    assert difference[60:].min() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_backward_direction_depends_on_the_future_only(kind):
    layer = build(kernel=kind, bidirectional=True)
    only_backward = copy.deepcopy(layer)
    with torch.no_grad():
        only_backward.branches[0].norm.weight.zero_()
        only_backward.D.zero_()
    u = double(1, 100, 4)
    changed = u.clone()
    changed[:, :41] += 1
    difference = (only_backward(u) - only_backward(changed)).abs().amax((0, 2))
    assert difference[40:].max() < 1e-12
    assert difference[39] > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_delayed_input_gives_a_delayed_output(kind):
    layer = build(kernel=kind)
    u = double(2, 80, 4)
    late = torch.cat([torch.zeros(2, 13, 4, dtype=torch.float64), u], 1)
    assert torch.allclose(layer(late)[:, 13:], layer(u), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("training", [False, True])
def test_padding_is_treated_as_absent(kind, bidirectional, backend, training):
    layer = build(kernel=kind, bidirectional=bidirectional, backend=backend, groups=2).train(training)
    u, lengths = double(3, 70, 4), torch.tensor([70, 31, 1])
    noisy = torch.where(torch.arange(70)[:, None] < lengths[:, None, None], u, torch.tensor(1e3, dtype=torch.float64))
    longer = torch.cat([noisy, 7 * double(3, 25, 4)], 1)
    state = copy.deepcopy(layer.state_dict())
    y = layer(u, lengths=lengths)
    after = copy.deepcopy(layer.state_dict())
    layer.load_state_dict(state)
    again = layer(longer, lengths=lengths)
    assert torch.allclose(again[:, :70], y, atol=1e-9)
    assert torch.allclose(layer.branches[0].norm.running_var, after["branches.0.norm.running_var"])
    for i, n in enumerate(lengths.tolist()):
        assert again[i, n:].abs().max() == 0
        if not training:
            assert torch.allclose(layer(u[i : i + 1, :n]), y[i : i + 1, :n], atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_values_in_the_padding_do_not_affect_the_output(kind, training):
    layer = build(kernel=kind, bidirectional=True).train(training)
    u, lengths = double(3, 30, 4), torch.tensor([20, 5, 20])
    clean = copy.deepcopy(layer)(u, lengths=lengths)
    u[1, 5:] = float("nan")
    u[2, 20:] = float("inf")
    assert torch.allclose(layer(u, lengths=lengths), clean, atol=1e-12)


def test_lengths_may_be_a_list_and_empty_sequences_give_zeros():
    layer = build().train()
    u = double(3, 30, 4)
    other = copy.deepcopy(layer)
    assert torch.equal(layer(u, lengths=[30, 0, 7]), other(u, lengths=torch.tensor([30, 0, 7], dtype=torch.uint8)))
    before = copy.deepcopy(layer.state_dict())
    assert layer(u, lengths=[0, 0, 0]).abs().max() == 0
    assert all(torch.equal(before[name], x) for name, x in layer.state_dict().items())


def test_short_sequences_in_long_padding_keep_float32_accuracy():
    exact = MRConv(4, 16384, kernel_size=32, bidirectional=True, backend="reference", dtype=torch.float64)
    layer = copy.deepcopy(exact).float()
    layer.backend = "auto"
    u, lengths = torch.randn(4, 16384, 4) + 0.5, torch.tensor([100, 50, 80, 10])
    y, _, grads = training_step(exact, u.double(), lengths=lengths)
    z, _, grads32 = training_step(layer, u, lengths=lengths)
    largest = max(g.norm() for g in grads.values())
    assert relative(z.double(), y) < 1e-5
    assert all((grads32[name].double() - g).norm() < 1e-4 * largest for name, g in grads.items())


def test_frozen_statistics_stay_frozen_in_training_mode():
    layer = build().train()
    for m in layer.modules():
        if isinstance(m, torch.nn.BatchNorm1d):
            m.eval()
    u = double(3, 30, 4)
    before = copy.deepcopy(layer.state_dict())
    y = layer(u)
    assert all(torch.equal(before[name], x) for name, x in layer.state_dict().items())
    assert torch.equal(y, layer.eval()(u))


def test_full_lengths_change_nothing():
    layer = build(bidirectional=True).train()
    u = double(3, 50, 4)
    other = copy.deepcopy(layer)
    assert torch.allclose(layer(u), other(u, lengths=torch.full((3,), 50)), atol=1e-12)
    assert torch.allclose(layer.branches[1].norm.running_var, other.branches[1].norm.running_var)


@pytest.mark.parametrize("kernel_size", [1, 2, 7, 32])
@pytest.mark.parametrize("rate", [0.25, 0.5, 2.0])
@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_rate_keeps_every_branch_gain_at_dc(kernel_size, rate, combine):
    layer = MRConv(4, 1024, kernel_size=kernel_size, bidirectional=True, combine=combine, dtype=torch.float64)
    for branches in layer.branches:
        delay = 1 / rate - 1 if branches.anticausal else 0.0
        pairs = zip(branches.kernel(), branches.kernel(rate, delay), branches.kernel.lengths, strict=True)
        for k, other, n in pairs:
            if kernel_size == 1:  # constant
                k, other = k.expand(-1, n), other.expand(-1, resampled(n, rate))
            assert torch.allclose(k.sum(1), other.sum(1), atol=1e-10)


def low_frequency_signal(L, generator=0):
    spectrum = torch.zeros(4, 8, L // 2 + 1, dtype=torch.complex128)
    top = L // 20
    draw = torch.Generator().manual_seed(generator)
    spectrum[..., 1:top] = torch.randn(4, 8, top - 1, dtype=torch.complex128, generator=draw)
    return torch.fft.irfft(spectrum, L).transpose(1, 2).contiguous() * L**0.5


@pytest.mark.parametrize("kernel_size", [1, 2, 32, 64])
def test_half_rate_gives_the_decimated_output_of_long_branches(kernel_size):
    u = low_frequency_signal(8192)
    (branches,) = MRConv(8, 8192, kernel_size=kernel_size, dtype=torch.float64).branches
    checked = 0
    for (k, lags), (half, half_lags) in zip(branches.kernels(), branches.kernels(0.5), strict=True):
        if len(lags) >= 1024:
            full = ops.conv(u.transpose(1, 2), k, lags)[..., ::2]
            assert relative(ops.conv(u[:, ::2].transpose(1, 2), half, half_lags), full) < 0.02
            checked += 1
    assert checked == 4


@pytest.mark.parametrize("bidirectional", [False, True])
def test_half_rate_of_a_layer_stays_close(bidirectional):
    layer = MRConv(8, 4096, kernel_size=32, bidirectional=bidirectional, dtype=torch.float64)
    for step in range(30):
        layer(low_frequency_signal(4096, step))
    u = low_frequency_signal(4096, 99)
    layer.eval()
    assert relative(layer(u[:, ::2], rate=0.5), layer(u)[:, ::2]) < 0.15


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rate", [0.5, 0.3])
def test_merging_at_a_rate_equals_running_at_it(bidirectional, rate):
    layer = build(l_max=100, bidirectional=bidirectional)
    u = double(2, 77, 4)
    expected = layer(u, rate=rate)
    k, b = layer.k_rep(rate=rate)
    assert k.shape[-1] == round(100 * rate)
    merged = copy.deepcopy(layer).reparameterize(rate=rate)
    assert relative(merged(u), expected) < 1e-12
    assert relative(merged(u, rate=rate), expected) < 1e-12
    assert torch.equal(merged.bias, b)
    other = MRConv(4, 100, kernel_size=4, bidirectional=bidirectional, rate=rate, merged=True, dtype=torch.float64)
    other.load_state_dict(merged.state_dict())
    assert torch.equal(other(u), merged(u))


def test_a_merged_layer_rejects_another_rate():
    merged = build().reparameterize()
    with pytest.raises(ValueError, match=r"rate=0.5: this layer was merged at rate 1 .*reparameterize\(rate=0.5\)"):
        merged(double(1, 9, 4), rate=0.5)
    with pytest.raises(ValueError, match="merged at rate 1"):
        merged.k_rep(rate=2.0)
    with pytest.raises(ValueError, match="merged at rate 1"):
        merged.reparameterize(rate=0.5)


@pytest.mark.parametrize("kind", ["dense", "dilated", "sparse", "fourier+sparse"])
def test_discrete_kernels_reject_another_rate(kind):
    layer = build(kernel=kind)
    for call in (lambda: layer(double(1, 9, 4), rate=0.5), lambda: layer.k_rep(rate=0.5)):
        with pytest.raises(ValueError, match=r"rate=0.5 needs a continuous kernel such as 'fourier'"):
            call()
    layer(double(1, 9, 4), rate=1.0)


def test_decay_fixes_the_ratio_of_the_kernels():
    layer = MRConv(3, 64, kernel="dense", kernel_size=4, combine="concat", decay=(1.0, 3.0), dtype=torch.float64)
    (branches,) = layer.branches
    assert branches.alpha is None
    assert torch.allclose(branches.decay.square().sum(0), torch.ones(3, dtype=torch.float64))
    ratio = branches.decay[:-1] / branches.decay[1:]
    assert torch.allclose(ratio, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).expand(4, 3))
    k, b = layer.k_rep()
    kernels = [d[:, None] * kernel for d, (kernel, _) in zip(branches.decay, branches.kernels(), strict=True)]
    assert torch.allclose(k, torch.cat(kernels, 1))
    assert b.abs().max() == 0
    assert "branches.0.alpha" not in layer.state_dict()


def test_concatenated_dilated_kernels_spread_with_their_length():
    (branches,) = MRConv(2, 32, kernel="dilated", kernel_size=4, combine="concat").branches
    assert [lags for _, lags in branches.kernels()] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 10, 12, 14),
        (16, 20, 24, 28),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_the_smaller_layer_on_a_larger_batch(kind):
    layer = build(d_model=6, kernel=kind, groups=3, bidirectional=True).train()
    small = MRConv(2, 64, kernel=kind, kernel_size=4, bidirectional=True, dtype=torch.float64, seed=0)
    state = layer.state_dict()
    small.load_state_dict(state | {"D": torch.zeros(2, dtype=torch.float64)})
    u = double(2, 50, 6)
    expected = small(u.view(2, 50, 3, 2).transpose(1, 2).reshape(6, 50, 2)).view(2, 3, 50, 2)
    expected = expected.transpose(1, 2).reshape(2, 50, 6) + layer.D * u
    assert torch.allclose(layer(u), expected, atol=1e-10)


def test_heads_are_independent_kernels_on_the_same_input():
    layer = build(d_model=3, heads=2)
    k, b = layer.k_rep()
    u = double(2, 50, 3)
    y = layer(u)
    for head in range(2):
        channels = slice(3 * head, 3 * head + 3)
        expected = ops.fft_conv(u.transpose(1, 2), k[channels]).transpose(1, 2) + b[channels] + layer.D[channels] * u
        assert torch.allclose(y[..., channels], expected, atol=1e-12)


def test_every_length_runs():
    layer = build(l_max=20, bidirectional=True)
    for L in (1, 2, 19, 20, 21, 300):
        assert layer(double(2, L, 4)).shape == (2, L, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_or_buffer_is_complex(kind):
    layer = build(kernel=kind, bidirectional=True)
    for tensor in (*layer.state_dict().values(), *layer.reparameterize().state_dict().values()):
        assert not tensor.is_complex()


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
def test_the_backend_does_not_change_the_state_dict_keys(backend):
    assert list(build(backend=backend).state_dict()) == list(build().state_dict())
