"""Branch sums by Toeplitz products == the float64 reference, to the accuracy of bfloat16."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import Algorithm, BranchWeights, Normalization, Selection, Taps, select

from ..conftest import gradients, relative, slow_except, training_step

pytest.importorskip("triton")
from .helpers import DEVICE, channels_last

TOLERANCE = 5e-3 if DEVICE == "cuda" else 2e-2  # the interpreter truncates
TOEPLITZ = Selection(Algorithm.TOEPLITZ, True)


def both(sizes, causal, lengths, mask, sequences=None):
    """Return `branch_sum` and its reference as functions of u, weight, the kernels, and optionally skip and beta.

    With `sequences`, statistics are those of so many sequences.
    """
    lags = [range(size) if i < causal else range(-1, -1 - size, -1) for i, size in enumerate(sizes)]

    def run(f, *selection):
        def call(u, weight, *others):
            ends = None if lengths is None else lengths.to(u.device)
            taps = [Taps(*kernel) for kernel in zip(others[: len(sizes)], lags, strict=True)]
            skip, beta = others[len(sizes) :] or (None, None)
            normalization = Normalization([BranchWeights(weight, None, beta)], skip, ends)
            return f(u * mask.to(u.device), taps, normalization, *selection)

        return call

    if sequences is None:
        return run(ops.branch_sum, TOEPLITZ), run(ops.branch_sum_reference)
    return run(ops.subsampled_branch_sum, sequences, TOEPLITZ, "triton"), run(ops.branch_sum_reference, sequences)


def problem(B, C, L, sizes, masked=False, skip=True, order=channels_last):
    """Return u, its lengths and mask, and the other inputs, all float64, u exactly representable in bfloat16."""
    u = order((torch.randn(B, C, L) + 0.3).bfloat16()).double()
    lengths = torch.tensor([max(0, L - 29 * i) for i in range(B)]) if masked else None
    mask = torch.arange(L) < (torch.full((B,), L) if lengths is None else lengths)[:, None]
    others = [torch.randn(len(sizes), C), *(torch.randn(C, n) / n**0.5 for n in sizes)]
    others += [torch.randn(C), torch.randn(len(sizes), C)] if skip else []
    return u, lengths, mask[:, None], [x.double() for x in others]


def assert_same(u, lengths, mask, others, sizes, causal, sequences=None):
    fast, reference = both(sizes, causal, lengths, mask, sequences)
    x, rest = channels_like(u), [x.to(DEVICE).float() for x in others]
    y, grads = gradients(lambda *a: fast(*a)[0] * mask.to(DEVICE), x, *rest)
    expected, expected_grads = gradients(lambda *a: reference(*a)[0] * mask, u, *others)
    assert y.dtype == grads[0].dtype == torch.bfloat16
    assert y.stride() == x.stride() == grads[0].stride()
    assert relative(y.double().cpu(), expected) < TOLERANCE
    largest = max(
        b.norm() for b in expected_grads[2 : 2 + len(sizes)]
    )  # the gradient of a single tap is rounding error
    norms = [b.norm() for b in expected_grads[:2]] + [largest] * len(sizes)
    norms += [max(b.norm(), u.numel() ** 0.5) for b in expected_grads[len(norms) :]]  # sums of as many rounded numbers
    for a, b, norm in zip(grads, expected_grads, norms, strict=True):
        assert (a.double().cpu() - b).norm() < 2 * TOLERANCE * norm


def channels_like(u):
    return torch.empty_like(u, dtype=torch.bfloat16, device=DEVICE).copy_(u)


@pytest.mark.parametrize(
    ("B", "C", "L", "sizes", "causal", "masked", "skip"),
    [
        (2, 3, 2, (1, 2), 2, False, True),
        (3, 5, 63, (2, 4, 63), 3, False, False),
        (3, 2, 130, (2, 16, 64, 200, 4, 130), 4, True, True),
        (5, 2, 300, (300, 300), 1, True, False),
        (20, 1, 257, (16, 129, 1), 0, False, True),
        pytest.param(70, 1, 140, (4, 140, 40), 2, True, True, marks=pytest.mark.slow),
        (3, 2, 1030, (2, 128, 100, 1, 30), 2, True, True),  # all short
        pytest.param(40, 1, 1024, (128, 129, 16), 1, False, False, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients(B, C, L, sizes, causal, masked, skip):
    assert_same(*problem(B, C, L, sizes, masked, skip), sizes, causal)


def test_time_contiguous_inputs():
    sizes = (4, 128)
    assert_same(*problem(3, 2, 128, sizes, order=torch.Tensor.contiguous), sizes, 1)


def test_sequences_shorter_than_kernels():
    sizes, lengths = (16, 32, 9, 20), torch.tensor([0, 0, 5, 3])
    u, _, _, others = problem(4, 2, 260, sizes)
    assert_same(u, lengths, (torch.arange(260) < lengths[:, None])[:, None], others, sizes, 2)


def test_gradients_where_much_cancels():
    """Smooth inputs, kernels that take differences, and a gradient that is mostly the output, so most terms cancel."""
    sizes, t = (4, 32, 64, 32), torch.arange(600)
    u = (0.5 + torch.cos(t / 60 + torch.arange(6).view(3, 2, 1))).bfloat16()
    kernels = [torch.cat([torch.ones(2, n // 2), -torch.ones(2, n // 2)], 1) / n for n in sizes]
    weight, mask = torch.rand(4, 2) + 0.5, torch.ones(3, 1, 600, dtype=torch.bool)
    fast, reference = both(sizes, 2, None, mask)
    x = u.double().requires_grad_()
    y, *_ = reference(x, *(z.double() for z in (weight, *kernels)))
    g = (y.detach() + 0.1 * torch.randn(3, 2, 600)).bfloat16()
    (expected,) = torch.autograd.grad(y, x, g.double())
    x = u.to(DEVICE).requires_grad_()
    y, *_ = fast(x, *(z.to(DEVICE) for z in (weight, *kernels)))
    (du,) = torch.autograd.grad(y, x, g.to(DEVICE))
    assert relative(du.double().cpu(), expected) < 2 * TOLERANCE


def test_statistics():
    sizes = (2, 40, 150, 30)
    u, lengths, mask, others = problem(4, 3, 300, sizes, masked=True)
    fast, reference = both(sizes, 3, lengths, mask)
    statistics = fast(channels_like(u), *(x.to(DEVICE).float() for x in others))[1:]
    for a, b in zip(statistics, reference(u, *others)[1:], strict=True):
        assert a.dtype == torch.float32
        assert relative(a.double().cpu(), b) < TOLERANCE


def test_gradients_of_branches_with_large_means():
    """Outputs that are kept in bfloat16 must be centred first, since their mean is much larger than their deviation."""
    sizes, (u, _, mask, others) = (150, 140), problem(3, 2, 300, (150, 140))
    kernels = [(1 + 0.1 * k) / len(k) for k in others[1:3]]
    assert_same((u + 8).bfloat16().double(), None, mask, [others[0], *kernels, *others[3:]], sizes, 1)


def test_empty_batch():
    sizes = (2, 150)
    fast, _ = both(sizes, 1, None, torch.ones(1, 1, 1, dtype=torch.bool))
    u, _, _, others = problem(1, 2, 160, sizes)
    y, grads = gradients(lambda *a: fast(*a)[0], channels_like(u)[:0], *(x.to(DEVICE).float() for x in others))
    assert y.shape == grads[0].shape == (0, 2, 160)
    assert all(not g.any() for g in grads)


def cheapest(algorithm):
    """Return costs at which this algorithm is the cheapest."""
    return lambda u, triton, candidate, problem: float(candidate is not algorithm)


@pytest.mark.parametrize(
    ("kind", "size", "bidirectional"),
    slow_except([("fourier+sparse", 8, True), ("fourier", 2, False)], ("fourier", 2, False)),
)
def test_layers_select_it_where_it_is_cheapest(monkeypatch, kind, size, bidirectional):
    monkeypatch.setattr(select, "cost", cheapest(Algorithm.TOEPLITZ))
    layer = MRConv(3, 150, kernel=kind, kernel_size=size, bidirectional=bidirectional, backend="triton").to(DEVICE)
    u = torch.randn(2, 140, 3, device=DEVICE)
    assert layer.explain(u.bfloat16()).algorithm is Algorithm.TOEPLITZ
    assert layer.explain(u).algorithm is not Algorithm.TOEPLITZ
    exact = copy.deepcopy(layer).cpu().double()
    exact.backend = "reference"
    y, du, grads = training_step(exact, u.cpu().bfloat16().double())
    z, dz, triton_grads = training_step(layer, u.bfloat16())
    assert relative(z.double().cpu(), y) < TOLERANCE
    assert relative(dz.double().cpu(), du) < 2 * TOLERANCE
    largest = max(g.norm() for g in grads.values())
    assert all((triton_grads[name].double().cpu() - g).norm() < 2 * TOLERANCE * largest for name, g in grads.items())


def test_kernels_of_one_value_per_channel_do_not_select_it(monkeypatch):
    monkeypatch.setattr(select, "cost", cheapest(Algorithm.TOEPLITZ))
    u = torch.randn(3, 80, 4, device=DEVICE).bfloat16()
    for bidirectional in (False, True):
        layer = MRConv(4, 90, kernel_size=1, bidirectional=bidirectional, backend="triton").to(DEVICE)
        assert layer.explain(u).algorithm is not Algorithm.TOEPLITZ


@pytest.mark.parametrize(("tap_cost", "algorithm"), [(1.3, Algorithm.TAPS), (1.4, Algorithm.TOEPLITZ)])
def test_taps_select_it_where_it_is_much_cheaper(monkeypatch, tap_cost, algorithm):
    costs = {Algorithm.TAPS: tap_cost, Algorithm.TOEPLITZ: 1.0, Algorithm.SPECTRAL: 2.0}
    monkeypatch.setattr(select, "cost", lambda u, triton, algorithm, problem: costs[algorithm])
    layer = MRConv(4, 90, kernel="dilated", kernel_size=4, backend="triton").to(DEVICE)
    assert layer.explain(torch.randn(3, 80, 4, device=DEVICE).bfloat16()).algorithm is algorithm


def test_the_ops_are_registered_correctly():
    u = channels_last(torch.randn(2, 3, 130, device=DEVICE).bfloat16()).requires_grad_()
    kernel, weight = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((3, 44), (3, 3)))
    args = (u, kernel, weight, *[None] * 7, 1e-5, False, True, [4, 8, 32], 1)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.mrconv.branch_sum_toeplitz.default, args, test_utils=checks)


def test_other_precisions_raise():
    taps, normalization = [Taps(torch.zeros(2, 3), range(3))], Normalization(torch.zeros(1, 2))
    with pytest.raises(TypeError, match=r"takes u in bfloat16; got torch\.float16: use SPECTRAL"):
        ops.branch_sum(torch.zeros(1, 2, 3).half(), taps, normalization, TOEPLITZ)
