"""Normalised branches by Toeplitz products == the float64 reference, as far as bfloat16 goes."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import select as dispatch
from mrconv.ops import toeplitz_branch_sum

from ..conftest import gradients, relative, training_step

pytest.importorskip("triton")
from mrconv.ops.branch_sum import toeplitz_triton as kernels

from .test_toeplitz import _poison, channels_last  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 5e-3 if DEVICE == "cuda" else 2e-2  # the interpreter cuts bits off


def both(sizes, forwards, lengths, mask):
    """Return the op and its reference as functions of u, weight, the kernels and maybe skip and bias; with the rest."""
    n = len(sizes)

    def fast(u, weight, *others):
        here, ends = mask.to(u.device), None if lengths is None else lengths.to(u.device)
        own, skip = others[:n], others[n:] or (None, None)
        return toeplitz_branch_sum(u * here, own[:forwards], own[forwards:], weight, *skip, ends)

    def plain(u, weight, *others):
        lags = [range(size) if i < forwards else range(-1, -1 - size, -1) for i, size in enumerate(sizes)]
        branches = list(zip(others[:n], lags, strict=True))
        return ops.branch_sum_reference(u * mask, branches, weight, *(others[n:] or (None, None)), lengths)

    return fast, plain


def problem(B, C, L, sizes, masked=False, skip=True, order=channels_last):
    """Return u, its lengths and mask, and the other inputs, all float64 with u what bfloat16 can hold."""
    u = order((torch.randn(B, C, L) + 0.3).bfloat16()).double()
    lengths = torch.tensor([max(0, L - 29 * i) for i in range(B)]) if masked else None
    mask = torch.arange(L) < (torch.full((B,), L) if lengths is None else lengths)[:, None]
    others = [torch.randn(len(sizes), C), *(torch.randn(C, n) / n**0.5 for n in sizes)]
    others += [torch.randn(C), torch.randn(C)] if skip else []
    return u, lengths, mask[:, None], [x.double() for x in others]


def assert_same(u, lengths, mask, others, sizes, forwards):
    fast, plain = both(sizes, forwards, lengths, mask)
    x, rest = channels_like(u), [x.to(DEVICE).float() for x in others]
    y, grads = gradients(lambda *a: fast(*a)[0] * mask.to(DEVICE), x, *rest)
    expected, expected_grads = gradients(lambda *a: plain(*a)[0] * mask, u, *others)
    assert y.dtype == grads[0].dtype == torch.bfloat16
    assert y.stride() == x.stride() == grads[0].stride()
    assert relative(y.double().cpu(), expected) < TOLERANCE
    largest = max(b.norm() for b in expected_grads[2 : 2 + len(sizes)])  # one tap has no gradient but of rounding
    norms = [b.norm() for b in expected_grads[:2]] + [largest] * len(sizes)
    norms += [max(b.norm(), u.numel() ** 0.5) for b in expected_grads[len(norms) :]]  # sums of as many rounded numbers
    for a, b, norm in zip(grads, expected_grads, norms, strict=True):
        assert (a.double().cpu() - b).norm() < 2 * TOLERANCE * norm


def channels_like(u):
    return torch.empty_like(u, dtype=torch.bfloat16, device=DEVICE).copy_(u)


@pytest.mark.parametrize(
    ("B", "C", "L", "sizes", "forwards", "masked", "skip"),
    [
        (2, 3, 2, (1, 2), 2, False, True),
        (3, 5, 63, (2, 4, 63), 3, False, False),
        (3, 2, 130, (2, 16, 64, 200, 4, 130), 4, True, True),
        (5, 2, 300, (300, 300), 1, True, False),
        (20, 1, 257, (16, 129, 1), 0, False, True),
        (70, 1, 140, (4, 140, 40), 2, True, True),
        (3, 2, 1030, (2, 128, 100, 1, 30), 2, True, True),  # all short
        (40, 1, 1024, (128, 129, 16), 1, False, False),
    ],
)
def test_values_and_gradients(B, C, L, sizes, forwards, masked, skip):
    assert_same(*problem(B, C, L, sizes, masked, skip), sizes, forwards)


def test_time_contiguous_inputs():
    sizes = (4, 128)
    assert_same(*problem(3, 2, 128, sizes, order=torch.Tensor.contiguous), sizes, 1)


def test_sequences_shorter_than_kernels():
    sizes, lengths = (16, 32, 9, 20), torch.tensor([0, 0, 5, 3])
    u, _, _, others = problem(4, 2, 260, sizes)
    assert_same(u, lengths, (torch.arange(260) < lengths[:, None])[:, None], others, sizes, 2)


def test_gradients_where_much_cancels():
    """Smooth inputs, kernels that take differences, and a gradient that is mostly the output: little is left of it."""
    sizes, t = (4, 32, 64, 32), torch.arange(600)
    u = (0.5 + torch.cos(t / 60 + torch.arange(6).view(3, 2, 1))).bfloat16()
    kernels = [torch.cat([torch.ones(2, n // 2), -torch.ones(2, n // 2)], 1) / n for n in sizes]
    weight, mask = torch.rand(4, 2) + 0.5, torch.ones(3, 1, 600, dtype=torch.bool)
    fast, plain = both(sizes, 2, None, mask)
    x = u.double().requires_grad_()
    y, *_ = plain(x, *(z.double() for z in (weight, *kernels)))
    g = (y.detach() + 0.1 * torch.randn(3, 2, 600)).bfloat16()
    (expected,) = torch.autograd.grad(y, x, g.double())
    x = u.to(DEVICE).requires_grad_()
    y, *_ = fast(x, *(z.to(DEVICE) for z in (weight, *kernels)))
    (found,) = torch.autograd.grad(y, x, g.to(DEVICE))
    assert relative(found.double().cpu(), expected) < 2 * TOLERANCE


def test_statistics():
    sizes = (2, 40, 150, 30)
    u, lengths, mask, others = problem(4, 3, 300, sizes, masked=True)
    fast, plain = both(sizes, 3, lengths, mask)
    found = fast(channels_like(u), *(x.to(DEVICE).float() for x in others))[1:]
    for a, b in zip(found, plain(u, *others)[1:], strict=True):
        assert a.dtype == torch.float32
        assert relative(a.double().cpu(), b) < TOLERANCE


def test_channels_go_through_in_slices(monkeypatch):
    sizes = (2, 40, 150, 30)
    u, lengths, mask, others = problem(3, 5, 300, sizes, masked=True)
    fast, _ = both(sizes, 3, lengths, mask)
    inputs = [channels_like(u), *(x.to(DEVICE).float() for x in others)]
    y, whole = gradients(lambda *a: fast(*a)[0], *inputs)
    monkeypatch.setattr(kernels, "SLICE_BYTES", 2 * 2 * 3 * 384 * 2)  # two channels of two long branches
    z, found = gradients(lambda *a: fast(*a)[0], *inputs)
    assert torch.equal(y, z)
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))


@pytest.mark.parametrize(("kind", "size", "both_ways"), [("fourier+sparse", 8, True), ("fourier", 2, False)])
def test_layers_take_it_where_it_is_cheapest(monkeypatch, kind, size, both_ways):
    monkeypatch.setattr(dispatch, "cost", lambda u, triton, op, reach, taps: float(not op.startswith("toeplitz")))
    layer = MRConv(4, 300, kernel=kind, kernel_size=size, bidirectional=both_ways, backend="triton").to(DEVICE)
    u = torch.randn(3, 270, 4, device=DEVICE)
    assert layer.choice(u.bfloat16()).op == ("toeplitz sum both ways" if both_ways else "toeplitz sum")
    assert not layer.choice(u).op.startswith("toeplitz")
    exact = copy.deepcopy(layer).cpu().double()
    exact.backend = "reference"
    y, du, grads = training_step(exact, u.cpu().bfloat16().double())
    z, dz, found = training_step(layer, u.bfloat16())
    assert relative(z.double().cpu(), y) < TOLERANCE
    assert relative(dz.double().cpu(), du) < 2 * TOLERANCE
    largest = max(g.norm() for g in grads.values())
    assert all((found[name].double().cpu() - g).norm() < 2 * TOLERANCE * largest for name, g in grads.items())


def test_kernels_of_one_number_do_not_take_it(monkeypatch):
    monkeypatch.setattr(dispatch, "cost", lambda u, triton, op, reach, taps: float(not op.startswith("toeplitz")))
    u = torch.randn(3, 80, 4, device=DEVICE).bfloat16()
    for both_ways in (False, True):
        layer = MRConv(4, 90, kernel_size=1, bidirectional=both_ways, backend="triton").to(DEVICE)
        assert not layer.choice(u).op.startswith("toeplitz")


@pytest.mark.parametrize(("price", "op"), [(1.3, "tap sum"), (1.4, "toeplitz sum")])
def test_taps_take_it_where_it_is_much_cheaper(monkeypatch, price, op):
    prices = {"tap sum": price, "toeplitz sum": 1.0, "spectral": 2.0}
    monkeypatch.setattr(dispatch, "cost", lambda u, triton, op, reach, taps: prices[op])
    layer = MRConv(4, 90, kernel="dilated", kernel_size=4, backend="triton").to(DEVICE)
    assert layer.choice(torch.randn(3, 80, 4, device=DEVICE).bfloat16()).op == op


def test_the_ops_are_registered_correctly():
    u = channels_last(torch.randn(2, 3, 130, device=DEVICE).bfloat16()).requires_grad_()
    kernel, weight = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((3, 44), (3, 3)))
    args = (u, kernel, weight, None, None, None, [4, 8, 32], 1, 1e-5, False)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.mrconv.toeplitz_branch_sum.default, args, test_utils=checks)


def test_other_precisions_are_refused():
    with pytest.raises(TypeError, match=r"takes u in bfloat16, got torch\.float16: use spectral_branch_sum"):
        toeplitz_branch_sum(torch.zeros(1, 2, 3).half(), [torch.zeros(2, 3)], [], torch.zeros(1, 2))
