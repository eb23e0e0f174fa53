"""Mamba: the parallel scan equals the loop, and steps equal `forward`."""

import pytest
import torch
from torch.nn import functional as F

from mrconv.baselines.mamba import Mamba, selective_scan, selective_scan_reference
from mrconv.baselines.scans import linear_scan

from ..conftest import gradients, relative
from .helpers import assert_gradients_are_right, assert_padding_is_absent, change_before, stepped

D = 5


def mamba(**options):
    return Mamba(D, 64, d_state=3, dtype=torch.float64, **options).eval()


def scan_inputs(L, E=4, N=3):
    x, dt = torch.randn(2, 2, L, E, dtype=torch.float64)
    B, C = torch.randn(2, 2, L, N, dtype=torch.float64)
    A = -torch.rand(E, N, dtype=torch.float64) * 3
    return x, F.softplus(dt), A, B, C, torch.randn(E, dtype=torch.float64)


@pytest.mark.parametrize("L", [1, 2, 3, 63, 100])
def test_the_scan_equals_the_loop_with_all_gradients(L):
    inputs = scan_inputs(L)
    y, grads = gradients(selective_scan, *inputs)
    expected, expected_grads = gradients(selective_scan_reference, *inputs)
    assert relative(y, expected) < 1e-13
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative(grad, expected_grad) < 1e-12


@pytest.mark.parametrize("L", [1, 2, 5, 8])
def test_gradients_of_the_scan(L):
    a, b = torch.randn(2, 2, L, 3, dtype=torch.float64, requires_grad=True).unbind(0)
    assert torch.autograd.gradcheck(linear_scan, (a, b))
    assert torch.autograd.gradgradcheck(linear_scan, (a, b))


def test_the_scan_is_accurate_for_zero_decays_and_long_products():
    a = torch.rand(1, 1000, 2, dtype=torch.float64) * 1e-3
    a[:, ::7] = 0
    b = torch.randn_like(a)
    h, expected = torch.zeros(1, 2, dtype=torch.float64), []
    for t in range(1000):
        h = a[:, t] * h + b[:, t]
        expected.append(h)
    assert relative(linear_scan(a, b), torch.stack(expected, 1)) < 1e-14


@torch.no_grad()
def test_mamba_equals_its_equations():
    mixer, u = mamba(), torch.randn(2, 11, D, dtype=torch.float64)
    x, z = mixer.into(u).chunk(2, -1)
    padded = F.pad(x, (0, 0, 3, 0))
    taps = mixer.conv.weight[:, 0].T  # (d_conv, E)
    x = F.silu(sum(taps[j] * padded[:, j : j + 11] for j in range(4)) + mixer.conv.bias)
    dt, B, C = mixer.select(x).split(mixer.sizes, -1)
    dt = torch.log1p(torch.exp(mixer.dt(dt)))
    h, outputs = torch.zeros(2, 2 * D, 3, dtype=torch.float64), []
    for t in range(11):
        for n in range(3):
            decay = torch.exp(-dt[:, t] * mixer.A_log[:, n].exp())
            h[..., n] = decay * h[..., n] + dt[:, t] * B[:, t, n, None] * x[:, t]
        outputs.append(sum(C[:, t, n, None] * h[..., n] for n in range(3)) + mixer.D * x[:, t])
    assert relative(mixer(u), mixer.out(torch.stack(outputs, 1) * z * z.sigmoid())) < 1e-12


@pytest.mark.parametrize("d_conv", [1, 4])
@torch.no_grad()
def test_steps_equal_forward(d_conv):
    mixer, u = mamba(d_conv=d_conv), torch.randn(2, 23, D, dtype=torch.float64)
    y, state = stepped(mixer, u)
    assert relative(y, mixer(u)) < 1e-13
    assert [tuple(x.shape) for x in state.memory] == [(2, d_conv - 1, 2 * D), (2, 2 * D, 3)]


@torch.no_grad()
def test_mamba_is_causal():
    mixer, u = mamba(), torch.randn(1, 20, D, dtype=torch.float64)
    assert change_before(mixer, u, 13) < 1e-14
    changed = torch.cat([u[:, :13], u[:, 13:] + 1], 1)
    assert relative(mixer(changed)[:, 13:], mixer(u)[:, 13:]) > 1e-3


def test_padding_is_treated_as_absent():
    mixer = mamba()
    u = torch.randn(3, 13, D, dtype=torch.float64)
    lengths = torch.tensor([13, 6, 0])
    assert_padding_is_absent(mixer, u, lengths, 1e-13)


def test_gradients_of_the_mixer():
    assert_gradients_are_right(mamba(), torch.randn(2, 7, D, dtype=torch.float64), fast_mode=True)


def test_initial_step_sizes_lie_between_dt_min_and_dt_max():
    dt = F.softplus(Mamba(64, 8, dt_min=0.01, dt_max=0.5).dt.bias)
    assert 0.0099 < dt.min() < dt.max() < 0.501


@torch.no_grad()
def test_state_dict_round_trip_and_autocast():
    mixer, other, u = Mamba(D, 8), Mamba(D, 8), torch.randn(2, 9, D)
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(mixer(u), other(u))
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(u)
    assert y.dtype == torch.float32
    assert relative(y, other(u)) < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bidirectional": True}, "bidirectional=True: a Mamba is causal"),
        ({"d_state": 0}, "d_state must be an integer of at least 1; got 0"),
        ({"dt_min": 1.0}, "dt_min and dt_max"),
        ({"dt_rank": 0}, "dt_rank must be"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba(D, 8, **options)


def test_another_rate_is_rejected():
    with pytest.raises(ValueError, match="rate"):
        Mamba(D, 8)(torch.randn(1, 4, D), rate=0.5)
