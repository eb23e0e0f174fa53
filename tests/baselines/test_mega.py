"""MEGA: the moving average as a convolution equals its recurrence; attention equals its formula, also in chunks."""

import math

import pytest
import torch
from torch.nn.functional import silu

from mrconv.baselines.mega import EMA, Mega, MegaChunk, laplace

from ..conftest import relative
from .helpers import assert_gradients_are_right, assert_padding_is_absent, change_before

D, L_MAX = 6, 40
KINDS = [(attention, bidirectional) for attention in ("softmax", "laplace") for bidirectional in (False, True)]


def large_weights(mixer):
    """Draw weights of order 1; the initial ones make attention too weak to test."""
    with torch.no_grad():
        for p in mixer.parameters():
            p.normal_(std=0.5)
    return mixer.eval()


def mega(attention="softmax", bidirectional=False, chunk=None, l_max=L_MAX):
    options = {"attention": attention, "bidirectional": bidirectional, "chunk": chunk}
    return large_weights(Mega(D, l_max, d_ema=3, d_attention=5, dtype=torch.float64, **options))


def by_recurrence(ema, x, direction=0):
    h, outputs = x.new_zeros(x.shape[0], D, ema.d_ema), []
    for x_t in x.unbind(1):
        y, h = ema.ema_step(x_t, h, direction)
        outputs.append(y)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("L", [1, 2, 37, 100])
@torch.no_grad()
def test_the_average_as_a_convolution_equals_its_recurrence(L):
    x = torch.randn(2, L, D, dtype=torch.float64)
    ema = large_weights(EMA(D, 4, dtype=torch.float64))
    assert relative(ema(x), by_recurrence(ema, x) + ema.omega * x) < 1e-12
    both = large_weights(EMA(D, 4, bidirectional=True, dtype=torch.float64))
    backwards = by_recurrence(both, x.flip(1), 1).flip(1)
    assert relative(both(x), by_recurrence(both, x) + backwards + both.omega * x) < 1e-12


@torch.no_grad()
def test_the_average_of_zero_decay_is_finite():
    ema = EMA(D, 2, dtype=torch.float32)
    ema.alpha.fill_(100.0)
    ema.delta.fill_(100.0)
    assert ema.kernel(5).isfinite().all()
    assert not ema.kernel(5)[..., 1:].any()


def by_formula(mixer, x):
    """Compute MEGA as in the paper, query by query."""
    gated, L = mixer.gated, x.shape[1]
    averaged = silu(mixer.ema(x))
    z, gamma, phi, h = gated.gates(averaged).split(gated.sizes, -1)
    q, k = (silu(z) * gated.kappa[i] + gated.mu[i] for i in (0, 1))
    v, outputs = silu(gated.value(x)), []
    for t in range(L):
        c = gated.chunk or L
        first = t // c * c
        last = min(first + c, L) if mixer.bidirectional else t + 1
        s = range(first, last)
        distance = [max(-gated.ahead, min(t - j, gated.span - 1)) + gated.ahead for j in s]
        scores = (k[:, first:last] @ q[:, t, :, None])[..., 0]
        if gated.attention == "softmax":
            weights = torch.softmax(scores / math.sqrt(z.shape[-1]) + gated.distance[distance], -1)
        else:
            weights = laplace(scores / len(s) + gated.distance[distance])
        outputs.append((weights[..., None] * v[:, first:last]).sum(1))
    h = silu(h + gated.back(silu(gamma) * torch.stack(outputs, 1)))
    return phi.sigmoid() * h + (1 - phi.sigmoid()) * x


@pytest.mark.parametrize(("attention", "bidirectional"), KINDS)
@pytest.mark.parametrize("chunk", [None, 1, 8, 13])
@torch.no_grad()
def test_mega_equals_the_papers_formula(attention, bidirectional, chunk):
    mixer = mega(attention, bidirectional, chunk, l_max=11)
    for L in (1, 8, 27):
        x = torch.randn(2, L, D, dtype=torch.float64)
        assert relative(mixer(x), by_formula(mixer, x)) < 1e-12


@pytest.mark.parametrize(("attention", "bidirectional"), KINDS)
@torch.no_grad()
def test_one_chunk_longer_than_the_input_equals_no_chunks(attention, bidirectional):
    unchunked = mega(attention, bidirectional)
    options = {"d_ema": 3, "d_attention": 5, "attention": attention, "bidirectional": bidirectional}
    chunked = MegaChunk(D, L_MAX, chunk=50, dtype=torch.float64, **options)
    chunked.load_state_dict(unchunked.state_dict())
    for L in (1, 29, 40):
        x = torch.randn(2, L, D, dtype=torch.float64)
        assert torch.equal(chunked(x), unchunked(x))


@pytest.mark.parametrize(("attention", "bidirectional"), KINDS)
@torch.no_grad()
def test_positions_attend_within_their_chunk_only(attention, bidirectional):
    gated = mega(attention, bidirectional, chunk=7).gated
    x, averaged = torch.randn(2, 2, 24, D, dtype=torch.float64)
    y = gated(x, averaged, None)
    pieces = [gated(*pair, None) for pair in zip(x.split(7, 1), averaged.split(7, 1), strict=True)]
    assert relative(y, torch.cat(pieces, 1)) < 1e-12


def test_laplace_has_the_value_and_slope_of_relu_squared_at_sqrt_one_half():
    at = torch.tensor(math.sqrt(0.5), dtype=torch.float64, requires_grad=True)
    value = laplace(at)
    (slope,) = torch.autograd.grad(value, at)
    assert value.item() == pytest.approx(0.5)
    assert slope.item() == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("attention", "bidirectional"), KINDS)
def test_outputs_depend_on_later_inputs_only_if_bidirectional(attention, bidirectional):
    change = change_before(mega(attention, bidirectional, chunk=8), torch.randn(1, 20, D, dtype=torch.float64), 13)
    assert change > 1e-3 if bidirectional else change < 1e-13


@pytest.mark.parametrize(("attention", "bidirectional"), KINDS)
@pytest.mark.parametrize("chunk", [None, 4])
def test_padding_is_treated_as_absent(attention, bidirectional, chunk):
    mixer = mega(attention, bidirectional, chunk)
    lengths = torch.tensor([15, 9, 4, 1, 0])
    u = torch.randn(5, 15, D, dtype=torch.float64)
    assert_padding_is_absent(mixer, u, lengths, 1e-12)


@pytest.mark.parametrize(("attention", "bidirectional"), KINDS)
def test_gradients(attention, bidirectional):
    mixer, u = mega(attention, bidirectional, chunk=4), torch.randn(2, 7, D, dtype=torch.float64)
    assert_gradients_are_right(mixer, u, torch.tensor([7, 3]), fast_mode=True)


@torch.no_grad()
def test_half_precision_by_autocast_keeps_the_dtype():
    for attention, bidirectional in KINDS:
        mixer, u = Mega(D, L_MAX, attention=attention, bidirectional=bidirectional, chunk=4), torch.randn(2, 9, D)
        with torch.autocast("cpu", torch.bfloat16):
            y = mixer(u, torch.tensor([9, 3]))
        assert y.dtype == torch.float32
        assert relative(y, mixer(u, torch.tensor([9, 3]))) < 0.02


def test_errors_name_the_option():
    with pytest.raises(ValueError, match="attention must be one of softmax, laplace; got 'relu'"):
        Mega(D, 8, attention="relu")
    with pytest.raises(ValueError, match="chunk must be an integer of at least 1; got 0"):
        MegaChunk(D, 8, chunk=0)
    with pytest.raises(ValueError, match="d_ema must be"):
        Mega(D, 8, d_ema=0)
    with pytest.raises(TypeError, match="heads"):
        Mega(D, 8, heads=2)
    with pytest.raises(ValueError, match=r"u must have shape \(batch, length, d_model = 6\)"):
        Mega(D, 8)(torch.randn(1, 4, 5))
