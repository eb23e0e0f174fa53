"""State-space models: convolution, recurrence and matrix powers give the same outputs."""

import pytest
import torch

from mrconv.baselines import S4, S4D, S5, LiquidS4
from mrconv.baselines.hippo import hippo_legs, initial_diagonal, legs_normal_part
from mrconv.baselines.parameters import as_complex
from mrconv.baselines.s4 import with_conjugates
from mrconv.baselines.s4d import vandermonde
from mrconv.baselines.scans import constant_scan

from ..conftest import relative
from .helpers import stepped

DOUBLE = {"dtype": torch.float64}
RECURRENCES = [
    (S4D, {"init": init, "discretization": method, "n_ssm": 2})
    for init in ("legs", "lin", "inv")
    for method in ("zoh", "bilinear")
]
RECURRENCES += [
    (S4, {}),
    (S4, {"n_ssm": 4}),
    (S5, {}),
    (S5, {"blocks": 2, "discretization": "bilinear"}),
    (LiquidS4, {}),
    (LiquidS4, {"degree": 4}),
]


def build(cls, l_max=32, **options):
    return cls(4, l_max, **({"d_state": 8} | options), **DOUBLE)


def powers(A, B, length):
    """Return A^t B, (D, N, length)."""
    columns = [B]
    for _ in range(length - 1):
        columns.append((A @ columns[-1][..., None])[..., 0])
    return torch.stack(columns, -1)


@pytest.mark.parametrize("rate", [None, 0.5, 1.7])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 45])
@pytest.mark.parametrize(("cls", "options"), RECURRENCES)
def test_forward_is_the_recurrence(cls, options, length, rate):
    mixer, u = build(cls, **options), torch.randn(2, length, 4, **DOUBLE)
    assert relative(mixer(u, rate=rate), stepped(mixer, u, rate)[0]) < 1e-12


def test_hippo_legs_is_its_closed_form():
    A, B = hippo_legs(6)
    for n in range(6):
        assert B[n].item() == pytest.approx((2 * n + 1) ** 0.5)
        for k in range(6):
            expected = -(((2 * n + 1) * (2 * k + 1)) ** 0.5) if n > k else -(n + 1) if n == k else 0
            assert A[n, k].item() == pytest.approx(expected)


@pytest.mark.parametrize("N", [2, 8, 16])
def test_diagonal_plus_low_rank_is_hippo_legs_in_another_basis(N):
    A, B = hippo_legs(N)
    Lambda, VB, VP, V = legs_normal_part(N)
    basis = torch.cat([V, V.conj()], 1)
    P = with_conjugates(VP)
    rebuilt = basis @ (torch.diag(with_conjugates(Lambda)) - torch.outer(P, P.conj())) @ basis.mH
    assert torch.allclose(rebuilt, A + 0j, atol=1e-10)
    assert torch.allclose(basis @ with_conjugates(VB), B + 0j, atol=1e-10)
    assert torch.allclose(basis.mH @ basis, torch.eye(N, **DOUBLE) + 0j, atol=1e-12)
    assert (Lambda.real == -0.5).all()
    assert (Lambda.imag > 0).all()


def test_diagonal_initialisations_are_their_formulas():
    n = torch.arange(4, **DOUBLE)
    assert torch.allclose(initial_diagonal("lin", 8)[0], torch.complex(torch.full_like(n, -0.5), torch.pi * n))
    inverse = 8 / torch.pi * (8 / (2 * n + 1) - 1)
    assert torch.allclose(initial_diagonal("inv", 8)[0], torch.complex(torch.full_like(n, -0.5), inverse))


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 100])
def test_vandermonde_is_a_sum_of_powers(length):
    weights = torch.randn(2, 3, 4, dtype=torch.complex128)
    log_a = torch.complex(-torch.rand(3, 4, **DOUBLE), torch.randn(3, 4, **DOUBLE))
    t = torch.arange(length)
    direct = 2 * (weights[..., None] * log_a.exp()[..., None] ** t).sum(-2).real
    assert relative(vandermonde(weights, log_a, length), direct) < 1e-12


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_s4d_kernel_is_matrix_powers(method, rate):
    mixer = build(S4D, discretization=method, bidirectional=True)
    A, dt = torch.diag_embed(mixer.diagonal()), mixer.dt(rate)[..., None]
    B = as_complex(mixer.B).expand(4, -1)
    one = torch.eye(4, dtype=A.dtype)
    if method == "zoh":
        Abar = torch.linalg.matrix_exp(dt * A)
        Bbar = torch.linalg.solve(A, (Abar - one) @ B[..., None])[..., 0]
    else:
        Abar = torch.linalg.solve(one - dt / 2 * A, one + dt / 2 * A)
        Bbar = torch.linalg.solve(one - dt / 2 * A, dt * B[..., None])[..., 0]
    direct = 2 * torch.einsum("shn,hnt->sht", as_complex(mixer.C), powers(Abar, Bbar, 40)).real
    assert relative(mixer.kernel(40, rate), direct) < 1e-12


@pytest.mark.parametrize("l_max", [1, 2, 31, 32])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_s4_kernel_by_cauchy_and_woodbury_is_matrix_powers(l_max, rate):
    mixer = build(S4, l_max, bidirectional=True, n_ssm=2)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.1 * torch.randn_like(p)
    C = with_conjugates(mixer.output())
    for length in (l_max, l_max + 8):
        direct = torch.einsum("shn,hnt->sht", C, powers(*mixer.dense(rate), length))
        assert direct.imag.abs().max() < 1e-10
        assert relative(mixer.kernel(length, rate), direct.real) < 1e-11


def test_initial_s4_is_the_real_hippo_system_with_a_clipped_b():
    mixer = build(S4, 32)
    A, B = hippo_legs(8)
    _, VB, _, V = legs_normal_part(8)
    assert VB.imag.abs().max() > 2  # so that there is something to clip
    basis = torch.cat([V, V.conj()], 1)
    B = (basis @ with_conjugates(torch.complex(VB.real, VB.imag.clamp(-2, 2)))).real
    C = (with_conjugates(mixer.output()) @ basis.mH).real
    dt = mixer.dt(1.0)[..., None]
    one = torch.eye(8, **DOUBLE)
    Abar = torch.linalg.solve(one - dt / 2 * A, one + dt / 2 * A)
    Bbar = torch.linalg.solve(one - dt / 2 * A, dt * B[:, None])[..., 0]
    direct = torch.einsum("shn,hnt->sht", C, powers(Abar, Bbar, 32))
    assert relative(mixer.kernel(32, 1.0), direct) < 1e-11


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 63, 100])
def test_scan_equals_the_loop(length):
    a = torch.randn(3, dtype=torch.complex128) / 2
    b = torch.randn(2, length, 3, dtype=torch.complex128)
    x, states = torch.zeros_like(b[:, 0]), []
    for t in range(length):
        x = a * x + b[:, t]
        states.append(x)
    assert relative(constant_scan(a, b), torch.stack(states, 1)) < 1e-13


def test_backward_s5_is_forward_s5_on_the_reversed_input():
    both, u = build(S5, bidirectional=True), torch.randn(2, 21, 4, **DOUBLE)
    single = build(S5)
    total = torch.zeros_like(u)
    for direction in (0, 1):
        state = {name: p for name, p in both.state_dict().items() if name != "C"}
        single.load_state_dict(state | {"C": both.C[direction : direction + 1]})
        torch.nn.init.zeros_(single.D)
        total += single(u.flip(1)).flip(1) if direction else single(u)
    assert relative(both(u), total + both.D * u) < 1e-12


@pytest.mark.parametrize("cls", [S4D, S5])
def test_repeated_inputs_at_rate_2_give_the_outputs_of_rate_1(cls):
    mixer, u = build(cls, discretization="zoh"), torch.randn(2, 20, 4, **DOUBLE)
    twice = mixer(u.repeat_interleave(2, 1), rate=2)
    assert relative(twice[:, 1::2], mixer(u)) < 1e-12


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_liquid_terms_equal_the_liquid_recurrence_without_transition(degree):
    """The recurrence is x[t] = Bbar u[t] (x[t-1] + 1), up to products of `degree` inputs."""
    mixer, u = build(LiquidS4, degree=degree), torch.randn(2, 12, 4, **DOUBLE)
    B, C = mixer.discrete_input(1.0), as_complex(mixer.C)[0]
    x = [torch.zeros(2, 4, 4, dtype=B.dtype) for _ in range(degree + 1)]  # by number of factors
    x[0] += 1
    terms = []
    for t in range(12):
        x[1:] = [B * u[:, t, :, None] * lower for lower in x[:-1]]
        terms.append(2 * (C * sum(x[2:], torch.zeros_like(x[0]))).sum(-1).real)
    linear = S4.mix(mixer, u.transpose(1, 2), 1.0, False).transpose(1, 2)
    assert relative(mixer(u) - linear + u, torch.stack(terms, 1) + u) < 1e-12


def test_discrete_input_of_liquid_s4_equals_the_dense_one():
    mixer = build(LiquidS4)
    assert relative(mixer.discrete_input(0.5), mixer.dense(0.5)[1][:, :4]) < 1e-12


def test_bidirectional_liquid_s4_has_products_of_later_inputs():
    mixer, u = build(LiquidS4, bidirectional=True, degree=3), torch.randn(1, 9, 4, **DOUBLE)
    gains = mixer.gains(1.0)
    linear = S4.mix(mixer, u.transpose(1, 2), 1.0, False).transpose(1, 2)
    padded = torch.nn.functional.pad(u, (0, 0, 3, 3))
    at = lambda lag: padded[:, 3 - lag : 12 - lag]  # noqa: E731
    expected = gains[0, 0] * at(0) * at(1) + gains[1, 0] * at(0) * at(1) * at(2)
    expected = expected + gains[0, 1] * at(-1) * at(-2) + gains[1, 1] * at(-1) * at(-2) * at(-3)
    assert relative(mixer(u) - linear + u, expected + u) < 1e-12


def test_bidirectional_mixers_cannot_stream():
    mixer = build(S4D, bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional"):
        mixer.initial_state(1)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (S4D, {"d_state": 7}, "even"),
        (S4D, {"n_ssm": 3}, "n_ssm must divide"),
        (S4D, {"init": "fourier"}, "init must be one of"),
        (S4D, {"dt_min": 0.1, "dt_max": 0.01}, "dt_min"),
        (S5, {"blocks": 3}, "blocks must divide"),
        (LiquidS4, {"degree": 0}, "degree"),
    ],
)
def test_errors_name_the_option(cls, options, message):
    with pytest.raises(ValueError, match=message):
        build(cls, **options)
