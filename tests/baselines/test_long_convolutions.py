"""Kernels of the long convolutions against direct constructions."""

import math

import pytest
import torch

from mrconv.baselines import CKConv, HyenaFilter, LongConv, MultiresConv, SGConv
from mrconv.baselines.longconv import smooth, squash
from mrconv.ops import fft_conv_reference

from ..conftest import relative

DOUBLE = {"dtype": torch.float64}


def interpolated(values, factor):
    """Interpolate linearly at the centres of `factor` times as many intervals, constant beyond the outer ones."""
    out = []
    for j in range(int(len(values) * factor)):
        at = min(max((j + 0.5) / factor - 0.5, 0.0), len(values) - 1.0)
        low = int(at)
        high = min(low + 1, len(values) - 1)
        out.append(values[low] + (at - low) * (values[high] - values[low]))
    return out


@pytest.mark.parametrize("rate", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("init_scale", [0, 1])
@pytest.mark.parametrize("length", [5, 16, 37, 64])
def test_sgconv_kernel_is_its_pieces_one_after_the_other(length, init_scale, rate):
    mixer = SGConv(3, 64, kernel_size=8, decay=(1.5, 3.0), init_scale=init_scale, bidirectional=True, **DOUBLE)
    scales = 4 - init_scale
    assert len(mixer.w) == scales
    length = int(length * rate)
    kernel = mixer.kernel(length, rate)

    def joined(direction, channel, alpha, rate):
        taps = []
        for i in range(scales):
            piece = [alpha ** (scales - 1 - i) * w for w in mixer.w[i][direction, channel].tolist()]
            taps += interpolated(piece, rate * 2 ** (max(0, i - 1) + init_scale))
        assert len(taps) == 64 * rate
        return torch.tensor(taps, **DOUBLE)

    for direction in range(2):
        for channel, alpha in enumerate((1.5, 2.25, 3.0)):
            norm = joined(direction, channel, alpha, 1).norm()
            expected = joined(direction, channel, alpha, rate)[:length] / norm / rate
            assert relative(kernel[direction, channel], expected) < 1e-12


@pytest.mark.parametrize("length", [5, 16, 37])
def test_sgconv_gives_every_piece_a_gradient_on_a_short_input(length):
    mixer = SGConv(3, 64, kernel_size=8, **DOUBLE)
    mixer(torch.randn(2, length, 3, **DOUBLE)).sum().backward()
    reached = [(0, 8, 16, 32)[i] < length for i in range(4)]
    assert [bool(w.grad.abs().max() > 0) for w in mixer.w] == reached


def test_sgconv_norm_stays_fixed_when_the_kernel_changes():
    mixer = SGConv(3, 64, kernel_size=8, **DOUBLE)
    before = mixer.kernel(64, 1.0)
    assert torch.allclose(before.norm(dim=-1), torch.ones(1, 3, **DOUBLE))
    with torch.no_grad():
        for w in mixer.w:
            w *= 2
    assert torch.allclose(mixer.kernel(64, 1.0), 2 * before)


def test_squash_and_smooth_are_their_formulas():
    k = torch.randn(2, 3, 20, **DOUBLE)
    assert torch.allclose(squash(k, 0.3), k.sign() * (k.abs() - 0.3).clamp(min=0))
    padded = torch.nn.functional.pad(k, (2, 2))
    assert torch.allclose(smooth(k, 2), sum(padded[..., i : i + 20] for i in range(5)) / 5)
    assert torch.equal(smooth(k, 0), k)


def test_longconv_kernel_is_squashed_after_it_is_smoothed():
    mixer = LongConv(3, 20, lam=0.004, smooth=1, **DOUBLE)
    assert torch.equal(mixer.kernel(13, 1.0), squash(smooth(mixer.k, 1), 0.004)[..., :13])


def test_longconv_initially_decays_geometrically():
    mixer = LongConv(8, 4096)
    halves = mixer.k.detach()[0].unflatten(-1, (2, -1)).square().mean(-1).sqrt()
    speed = (8 / 2) ** (torch.arange(8) / 8)
    # the mean of exp(-2 s t) over the second half is exp(-s) times that over the first
    assert torch.allclose(halves[:, 1] / halves[:, 0], torch.exp(-speed / 2), rtol=0.1)


def test_kernel_dropout_applies_in_training_only():
    mixer, u = LongConv(3, 20, kernel_dropout=0.5, **DOUBLE), torch.randn(2, 20, 3, **DOUBLE)
    assert not torch.allclose(mixer(u), mixer(u))
    mixer.eval()
    assert torch.equal(mixer(u), mixer(u))


def tree_by_conv1d(mixer, x):
    """Compute the tree with torch's dilated convolutions, with reversed taps because torch correlates."""

    def conv(x, h, dilation):
        padded = torch.nn.functional.pad(x, (dilation * (h.shape[1] - 1), 0))
        return torch.nn.functional.conv1d(padded, h.flip(1)[:, None], dilation=dilation, groups=x.shape[1])

    a, details = x, []
    for j in range(mixer.depth):
        details.append(conv(a, mixer.h1, 2**j))
        a = conv(a, mixer.h0, 2**j)
    return a, details


@pytest.mark.parametrize(("kernel_size", "length"), [(2, 32), (2, 33), (3, 40), (4, 7), (4, 1)])
def test_fading_tree_is_a_tree_of_convolutions(kernel_size, length):
    mixer, u = MultiresConv(3, 40, kernel_size=kernel_size, **DOUBLE), torch.randn(2, length, 3, **DOUBLE)
    x = u.transpose(1, 2)
    a, details = tree_by_conv1d(mixer, x)
    w = mixer.w
    expected = w[:, :1] * a + w[:, -1:] * x
    for j, detail in enumerate(details):
        expected = expected + w[:, mixer.depth - j, None] * detail
    assert relative(mixer.run_tree(x), expected) < 1e-12
    assert relative(mixer(u), expected.transpose(1, 2)) < 1e-12


@pytest.mark.parametrize("memory_size", [1, 2, 4, 7, 11])
def test_uniform_tree_keeps_the_nodes_below_the_coarsest(memory_size):
    mixer = MultiresConv(3, 32, kernel_size=2, tree="uniform", memory_size=memory_size, **DOUBLE)
    u = torch.randn(2, 32, 3, **DOUBLE)
    x = u.transpose(1, 2)
    a, details = tree_by_conv1d(mixer, x)
    nodes = [(a, 0)]
    for level in reversed(range(5)):
        # kernel_size 2: node i of a level has the children i and i + 2^level steps back, so all lie 2^(level+1) apart
        nodes += [(details[level], i * 2 ** (level + 1)) for i in range(2 ** (4 - level))]
    expected = mixer.w[:, -1:] * x
    for weight, (coefficients, lag) in zip(mixer.w.T[:-1], nodes[:memory_size], strict=True):
        delayed = torch.nn.functional.pad(coefficients, (lag, 0))[..., :32]
        expected = expected + weight[:, None] * delayed
    assert relative(mixer(u), expected.transpose(1, 2)) < 1e-12


def test_the_default_tree_is_the_shallowest_that_reaches_l_max():
    for l_max, kernel_size in ((1024, 2), (1024, 4), (1000, 3), (2, 2)):
        depth = MultiresConv(1, l_max, kernel_size=kernel_size).depth
        reach = [(kernel_size - 1) * (2**d - 1) + 1 for d in (depth - 1, depth)]
        assert reach[0] < l_max <= reach[1]


@pytest.mark.parametrize("options", [{}, {"mask": 0.3}, {"depth": 1}])
def test_ckconv_kernel_is_the_network_at_each_lag(options):
    mixer = CKConv(3, 20, bidirectional=True, **options, **DOUBLE)
    kernel = mixer.kernel(15, 1.0)
    for t in (0, 7, 14):
        x = torch.tensor([2 * t / 20 - 1], **DOUBLE)
        for layer in mixer.layers[:-1]:
            x = torch.sin(30 * (layer.weight @ x + layer.bias))
        x = mixer.layers[-1].weight @ x + mixer.layers[-1].bias
        if "mask" in options:
            x = x * math.exp(-((t / 20) ** 2) / (2 * 0.3**2))
        assert torch.allclose(kernel[..., t].flatten(), x)


def test_initial_ckconv_kernels_have_energy_1():
    energy = CKConv(256, 512).kernel(512, 1.0).square().sum(-1).mean()
    assert 0.7 < energy < 1.3


def test_hyena_kernel_is_window_times_network():
    mixer = HyenaFilter(3, 20, bands=2, width=5, depth=3, **DOUBLE)
    kernel = mixer.kernel(20, 1.0)
    for t in (0, 9, 19):
        tau = t / 20
        angles = [2 * math.pi * tau * f for f in (1e-4, 1.0)]
        x = torch.tensor([tau, *map(math.cos, angles), *(-math.sin(a) for a in angles)], **DOUBLE)
        for layer in mixer.layers[:-1]:
            x = torch.sin(10 * (layer.weight @ x + layer.bias))
        delta = torch.linspace(math.log(100) / 1.5, math.log(100) / 0.3, 3, **DOUBLE)
        assert torch.allclose(kernel[0, :, t], mixer.layers[-1].weight @ x * torch.exp(-delta * tau))


@pytest.mark.parametrize("cls", [SGConv, LongConv, CKConv, HyenaFilter])
@pytest.mark.parametrize("length", [7, 32, 50])
def test_output_is_the_convolution_with_the_kernel_in_both_directions(cls, length):
    mixer, u = cls(3, 32, bidirectional=True, **DOUBLE), torch.randn(2, length, 3, **DOUBLE)
    x = u.transpose(1, 2)
    past, future = mixer.kernel(min(length, 32), 1.0)
    expected = fft_conv_reference(x, past) + mixer.D[:, None] * x
    later = torch.nn.functional.pad(x[..., 1:], (0, 1))  # tap 0 of the second kernel acts on u[t + 1]
    expected = expected + fft_conv_reference(later.flip(-1), future).flip(-1)
    assert relative(mixer(u), expected.transpose(1, 2)) < 1e-12


@pytest.mark.parametrize("cls", [CKConv, HyenaFilter])
def test_implicit_kernels_at_twice_the_rate_pass_through_the_same_points(cls):
    mixer = cls(3, 32, **DOUBLE)
    coarse, fine = mixer.kernel(32, 1.0), mixer.kernel(64, 2.0)
    assert fine.shape == (1, 3, 64)
    assert relative(2 * fine[..., ::2], coarse) < 1e-12


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (MultiresConv, {"kernel_size": 1}, "kernel_size"),
        (MultiresConv, {"tree": "uniform"}, "memory_size"),
        (MultiresConv, {"memory_size": 3}, "memory_size"),
        (MultiresConv, {"tree": "tall"}, "tree must be one of"),
        (LongConv, {"lam": -1}, "lam"),
        (LongConv, {"kernel_dropout": 1.5}, "kernel_dropout"),
        (CKConv, {"mask": 0.0}, "mask"),
        (SGConv, {"kernel_size": 0}, "kernel_size"),
        (SGConv, {"init_scale": -1}, "init_scale"),
    ],
)
def test_errors_name_the_option(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(4, 32, **options)
