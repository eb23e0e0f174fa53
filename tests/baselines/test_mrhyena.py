"""Mixers with an MRConv inside: equal to their formulas, merged and not, and trained exactly."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from mrconv import MRConvBlock, reparameterize
from mrconv.baselines.mega import GatedAttention
from mrconv.baselines.mrhyena import MRConvAttention, MRHyena

from ..conftest import randomise, relative, training_step
from .helpers import assert_gradients_are_right, change_before

D, L_MAX = 6, 40
CLASSES = [MRHyena, MRConvAttention]
KERNELS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


def mixer(cls, **options):
    if cls is MRConvAttention:
        options = {"d_attention": 5, "chunk": 16} | options
    built = cls(D, L_MAX, kernel_size=4, seed=0, dtype=torch.float64, **options)
    with torch.no_grad():
        for module in built.modules():
            if isinstance(module, GatedAttention):
                for p in module.parameters():
                    p.normal_(std=0.5)
    return randomise(built)


def causal_toeplitz(kernel, L):
    """Return (C, L, L) with kernel[c, t - s] at (t, s) and zeros at s > t."""
    t = torch.arange(L)
    lag = t[:, None] - t
    taps = F.pad(kernel, (0, max(L - kernel.shape[1], 0)))
    return taps[:, lag.clamp(min=0)] * (lag >= 0)


def direct(conv, x):
    """Convolve x (B, L, D) by a dense matrix per channel, from the merged kernel."""
    kernel, bias = conv.k_rep()
    L = x.shape[1]
    if conv.bidirectional:
        matrix = causal_toeplitz(kernel[0], L) + F.pad(causal_toeplitz(kernel[1], L - 1).mT, (1, 0, 0, 1))
    else:
        matrix = causal_toeplitz(kernel, L)
    return torch.einsum("cts,bsc->btc", matrix, x) + bias + conv.D * x


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_mrhyena_equals_its_formula_with_the_merged_kernel(kernel, bidirectional):
    built = mixer(MRHyena, kernel=kernel, bidirectional=bidirectional).eval()
    for L in (2, 31, 57):
        u = torch.randn(2, L, D, dtype=torch.float64)
        projected = F.pad(built.into(u), (0, 0, 1, 1) if bidirectional else (0, 0, 2, 0))
        taps = built.short.weight[:, 0].T
        x1, x2, v = (sum(taps[j] * projected[:, j : j + L] for j in range(3)) + built.short.bias).chunk(3, -1)
        assert relative(built(u), built.out(x2 * direct(built.conv, x1 * v))) < 1e-12


@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_mrconv_attention_is_mega_with_mrconv_as_the_average(bidirectional):
    built = mixer(MRConvAttention, bidirectional=bidirectional).eval()
    u = torch.randn(2, 37, D, dtype=torch.float64)
    averaged = F.silu(direct(built.conv, u))
    chunks = [built.gated(*pair, None) for pair in zip(u.split(16, 1), averaged.split(16, 1), strict=True)]
    assert relative(built(u), torch.cat(chunks, 1)) < 1e-12


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_merged_equals_branches_with_random_statistics(cls, kernel, bidirectional):
    built = mixer(cls, kernel=kernel, bidirectional=bidirectional, backend="reference").eval()
    merged = reparameterize(copy.deepcopy(built))
    assert merged.conv.merged
    for L in (1, 23, 40, 65):
        u = torch.randn(2, L, D, dtype=torch.float64)
        lengths = torch.tensor([L, L // 2])
        assert relative(merged(u), built(u)) < 1e-12
        assert relative(merged(u, lengths), built(u, lengths)) < 1e-12


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_training_equals_the_branches_reference(cls, bidirectional, padded):
    fast = mixer(cls, bidirectional=bidirectional, backend="torch")
    slow = copy.deepcopy(fast)
    slow.conv.backend = "reference"
    u = torch.randn(3, 29, D, dtype=torch.float64)
    options = {"lengths": torch.tensor([29, 17, 4])} if padded else {}
    y, du, grads = training_step(fast, u, **options)
    expected, expected_du, expected_grads = training_step(slow, u, **options)
    assert relative(y, expected) < 1e-11
    assert relative(du, expected_du) < 1e-10
    for name, grad in expected_grads.items():
        assert relative(grads[name], grad) < 1e-9, name
    for name, buffer in slow.named_buffers():
        assert torch.allclose(dict(fast.named_buffers())[name].double(), buffer.double(), atol=1e-12), name


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_more_padding_changes_no_statistics(cls, bidirectional):
    built = mixer(cls, bidirectional=bidirectional).train()
    other = copy.deepcopy(built)
    u, lengths = torch.randn(3, 21, D, dtype=torch.float64), torch.tensor([21, 12, 3])
    y = built(u, lengths)
    assert relative(other(F.pad(u, (0, 0, 0, 30), value=5.0), lengths)[:, :21], y) < 1e-11
    for a, b in zip(other.conv.buffers(), built.conv.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-12)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_is_treated_as_absent(cls, bidirectional):
    built = mixer(cls, bidirectional=bidirectional).eval()
    u = torch.randn(4, 35, D, dtype=torch.float64)
    lengths = torch.tensor([35, 16, 7, 0])
    for i, n in enumerate(lengths.tolist()):
        u[i, n:] = math.nan
    y = built(u, lengths)
    for i, n in enumerate(lengths.tolist()):
        assert not y[i, n:].any()
        if n:
            assert relative(y[i : i + 1, :n], built(u[i : i + 1, :n])) < 1e-12
    training = built.train()(u, lengths)
    training.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in built.parameters())


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_outputs_depend_on_later_inputs_only_if_bidirectional(cls, bidirectional):
    built, u = mixer(cls, bidirectional=bidirectional).eval(), torch.randn(1, 20, D, dtype=torch.float64)
    change = change_before(built, u, 13)
    assert change > 1e-3 if bidirectional else change < 1e-13


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("training", [False, True])
def test_gradients(cls, training):
    built = mixer(cls, bidirectional=True).train(training)
    assert_gradients_are_right(built, torch.randn(2, 7, D, dtype=torch.float64), fast_mode=True)


@pytest.mark.parametrize("cls", CLASSES)
@torch.no_grad()
def test_state_dict_round_trip_merged_and_not(cls):
    built, u = mixer(cls).eval(), torch.randn(2, 9, D, dtype=torch.float64)
    other = mixer(cls).eval()
    other.load_state_dict(built.state_dict())
    assert torch.equal(other(u), built(u))
    merged = reparameterize(built)
    again = mixer(cls, merged=True)
    again.load_state_dict(merged.state_dict())
    assert torch.equal(again(u), merged(u))


@pytest.mark.parametrize("cls", CLASSES)
def test_another_rate_is_rejected(cls):
    block = MRConvBlock(D, L_MAX)
    block.layer = cls(D, L_MAX)
    with pytest.raises(ValueError, match=rf"rate=2: {cls.__name__} runs at rate 1 only"):
        block(torch.randn(2, 33, D), rate=2.0)
    with pytest.raises(ValueError, match=rf"rate=2.0: layer is a {cls.__name__}, which is not merged at a rate"):
        reparameterize(block, rate=2.0)


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_name_the_option(cls):
    option = "d_conv" if cls is MRHyena else "chunk"
    for options, message in (
        ({"heads": 2}, "heads must be 1"),
        ({"kernel": "unknown"}, "kernel must be one of"),
        ({option: 0}, f"{option} must be"),
    ):
        with pytest.raises(ValueError, match=message):
            cls(D, 8, **options)
