"""Windows by Triton == the float64 reference: constant kernels and kernels of a few modes."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import select as dispatch
from mrconv.ops.branch_sum.moving_sum import mode_branch_sum, window_branch_sum

from ..conftest import gradients, relative, training_step
from .test_triton import DEVICE, LENGTHS, _poison, assert_same, double, inputs  # noqa: F401

pytest.importorskip("triton")
windows_triton = pytest.importorskip("mrconv.ops.branch_sum.moving_sum_triton")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("widths", [(1,), (1, 2, 4, 8, 16), (1, 2, 4, 100)])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("masked", "skipped"), [(False, True), (True, False)])
def test_windows(L, widths, channels_last, masked, skipped, monkeypatch):
    monkeypatch.setattr(windows_triton, "CHUNK", windows_triton.ROWS)  # several, at the longest
    u, lengths, mask = inputs(L, channels_last, masked)

    def fast(u, heights, weight, *skip):
        here, ends = mask.to(u.device), None if lengths is None else lengths.to(u.device)
        return window_branch_sum(u * here, heights, widths, weight, *(skip or (None, None)), ends)[0] * here

    def plain(u, heights, weight, *skip):
        branches = [(h[:, None].expand(-1, w), range(w)) for h, w in zip(heights, widths, strict=True)]
        return ops.branch_sum_reference(u * mask, branches, weight, *(skip or (None, None)), lengths)[0] * mask

    skip = [double(5), double(5)] if skipped else []  # and bias
    assert_same(fast, plain, u, double(len(widths), 5), double(len(widths), 5), *skip)


def test_windows_keep_float32_accuracy_over_a_long_sequence():
    L = 65_536 if DEVICE == "cuda" else 700
    exact = MRConv(2, L, kernel_size=1, dtype=torch.float64)
    layer = copy.deepcopy(exact).float().to(DEVICE)
    u = torch.randn(1, L, 2) + 0.2
    y, du, _ = training_step(exact, u.double())
    z, dz, _ = training_step(layer, u.to(DEVICE))
    assert relative(z.double().cpu(), y) < 2e-6
    assert relative(dz.double().cpu(), du) < 2e-6


def kernel_of(coefficients, width, period):
    """Return the kernel (C, width) that coefficients (C, 2 modes - 1) stand for."""
    tau = torch.arange(width, dtype=torch.float64)
    kernel = coefficients[:, :1].expand(-1, width)
    for m in range(1, coefficients.shape[1] // 2 + 1):
        angle = 2 * torch.pi * m / period * tau
        kernel = kernel + coefficients[:, 2 * m - 1, None] * angle.cos() + coefficients[:, 2 * m, None] * angle.sin()
    return kernel


def both(widths, periods, lengths, mask):
    """Return the op and its reference as functions of u, coefficients, weight and maybe skip; zero where masked."""

    def fast(u, coefficients, weight, *skip):
        here, ends = mask.to(u.device), None if lengths is None else lengths.to(u.device)
        y, *_ = mode_branch_sum(u * here, coefficients, widths, periods, weight, *(skip or (None, None)), ends)
        return y * here

    def plain(u, coefficients, weight, *skip):
        kernels = [kernel_of(*branch) for branch in zip(coefficients, widths, periods, strict=True)]
        branches = [(k, range(w)) for k, w in zip(kernels, widths, strict=True)]
        return ops.branch_sum_reference(u * mask, branches, weight, *(skip or (None, None)), lengths)[0] * mask

    return fast, plain


BRANCHES = {  # modes, widths, periods
    "constant": (1, (1, 2, 4), (1, 2, 4)),
    "doubling": (2, (2, 8, 32, 64, 128), (2, 8, 32, 64, 128)),
    "cut": (3, (4, 64, 77), (4, 64, 128)),
    "cut within a tile": (2, (3, 50), (4, 64)),
    "five modes": (5, (8, 16, 96), (8, 16, 96)),
    "longer than the input": (3, (300, 700), (512, 700)),
}


@pytest.mark.parametrize(
    ("L", "channels_last", "masked", "branches"),
    [  # Triton's interpreter takes a second or more for each
        *((1, True, True, name) for name in ("cut", "five modes")),
        *((2, True, False, name) for name in ("cut within a tile", "constant")),
        *((63, True, False, name) for name in BRANCHES),
        *((63, False, True, name) for name in ("cut", "longer than the input")),
        *((130, True, True, name) for name in ("doubling", "cut")),
        (200, True, False, "cut"),
    ],
)
def test_modes(L, channels_last, masked, branches):
    modes, widths, periods = BRANCHES[branches]
    u, lengths, mask = inputs(L, channels_last, masked, B=3 if masked else 2)
    skip = [double(5), double(5)] if channels_last else []  # and bias
    coefficients = double(len(widths), 5, 2 * modes - 1)
    assert_same(*both(widths, periods, lengths, mask), u, coefficients, double(len(widths), 5), *skip)


def test_modes_of_one_sequence_and_many_channels():
    u, _, mask = inputs(130, True, False, B=1, C=35)
    modes, widths, periods = BRANCHES["doubling"]
    coefficients = double(len(widths), 35, 2 * modes - 1)
    assert_same(*both(widths, periods, None, mask), u, coefficients, double(len(widths), 35), double(35), double(35))


def test_modes_where_gradients_are_found_in_slices(monkeypatch):
    from mrconv.ops.branch_sum import moving_modes_triton as mode_windows_triton

    modes, widths, periods = BRANCHES["cut"]
    u, lengths, mask = inputs(63, True, True)
    coefficients, weight = double(len(widths), 5, 2 * modes - 1), double(len(widths), 5)
    fast, _ = both(widths, periods, lengths, mask)
    whole = gradients(fast, *(x.to(DEVICE) for x in (u, coefficients, weight)))
    monkeypatch.setattr(mode_windows_triton, "SLICE_BYTES", 2 * len(widths) * 5 * 63 * 8)
    y, grads = gradients(fast, *(x.to(DEVICE) for x in (u, coefficients, weight)))
    assert all(relative(a, b) < 1e-12 for a, b in zip((y, *grads), (whole[0], *whole[1]), strict=True))


def test_modes_return_the_statistics():
    modes, widths, periods = BRANCHES["doubling"]
    u, lengths, mask = inputs(130, True, True)
    coefficients, weight = double(len(widths), 5, 2 * modes - 1), double(len(widths), 5)
    branches = [(kernel_of(c, w, w), range(w)) for c, w in zip(coefficients, widths, strict=True)]
    _, *expected = ops.branch_sum_reference(u * mask, branches, weight, None, None, lengths)
    on_device = (x.to(DEVICE) for x in (u * mask, coefficients, weight, lengths))
    x, coefficients, weight, lengths = on_device
    _, *found = mode_branch_sum(x, coefficients, widths, periods, weight, None, None, lengths)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize(
    ("dtype", "branches"), [(torch.float32, "doubling"), (torch.bfloat16, "cut"), (torch.float16, "doubling")]
)
def test_modes_in_lower_precision_match_float64(dtype, branches):
    modes, widths, periods = BRANCHES[branches]
    u, lengths, mask = inputs(130, True, True)
    u = u.to(dtype).double()
    others = [
        x.float().double()
        for x in (double(len(widths), 5, 2 * modes - 1), double(len(widths), 5), double(5), double(5))
    ]
    fast, plain = both(widths, periods, lengths, mask)
    y, grads = gradients(fast, u.to(DEVICE, dtype), *(x.to(DEVICE).float() for x in others))
    expected, expected_grads = gradients(plain, u, *others)
    tolerance = 2e-6 if dtype == torch.float32 else 5e-3
    assert y.dtype == grads[0].dtype == dtype
    assert relative(y.double().cpu(), expected) < tolerance
    for a, b in zip(grads, expected_grads, strict=True):
        assert relative(a.double().cpu(), b) < 2 * tolerance


def test_modes_keep_float32_accuracy_over_a_long_sequence():
    L = 65_536 if DEVICE == "cuda" else 700
    widths = [w for w in (2, 8, 64, 512, 4096, 65_536) if w <= L]
    u, mask = (torch.randn(1, L, 2) + 0.2).transpose(1, 2), torch.ones(1, 1, L, dtype=torch.bool)
    others = [torch.randn(len(widths), 2, 5), torch.randn(len(widths), 2), torch.randn(2), torch.randn(2)]
    fast, plain = both(widths, [max(w, 4) for w in widths], None, mask)
    y, grads = gradients(fast, u.to(DEVICE), *(x.to(DEVICE) for x in others))
    expected, expected_grads = gradients(plain, u.double(), *(x.double() for x in others))
    for a, b in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert relative(a.double().cpu(), b) < 2e-6


@pytest.mark.parametrize("kernel_size", [2, 4, 5])
def test_layers_run_as_waves_where_that_is_cheapest(kernel_size, monkeypatch):
    monkeypatch.setattr(dispatch, "cost", lambda u, triton, op, reach, taps: float(not op.endswith("waves")))
    exact = MRConv(5, 77, kernel_size=kernel_size, backend="reference", dtype=torch.float64)
    layer = copy.deepcopy(exact).to(DEVICE)
    layer.backend = "triton"
    u = torch.randn(2, 70, 5, dtype=torch.float64)
    assert layer.choice(u.to(DEVICE)).op == f"{kernel_size // 2 + 1} waves"
    y, du, grads = training_step(exact, u)
    z, dz, found = training_step(layer, u.to(DEVICE))
    assert relative(z.cpu(), y) < 1e-11
    assert relative(dz.cpu(), du) < 1e-11
    assert all(relative(found[name].cpu(), g) < 1e-9 for name, g in grads.items() if g.norm() > 1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (33, 2, 65), (300, 3, 5), (2049, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_are_summed_in_float64(shape, dtype):
    from mrconv.ops.triton_tools import summed

    parts = torch.randn(shape, dtype=dtype, device=DEVICE) + 1e3
    found = summed(parts)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, parts.double().sum(0), rtol=1e-14, atol=0)


def test_gradients_have_the_input_s_memory_format():
    u = torch.randn(2, 9, 3, device=DEVICE).transpose(1, 2).requires_grad_()
    heights, weight = (torch.randn(2, 3, device=DEVICE) for _ in range(2))
    y = window_branch_sum(u, heights, [1, 2], weight)[0]
    (du,) = torch.autograd.grad(y, u, torch.randn(2, 3, 9, device=DEVICE))
    assert du.stride() == u.stride()


def test_window_ops_are_registered_correctly():
    u = torch.randn(2, 3, 9, device=DEVICE, requires_grad=True)
    heights, weight = (torch.randn(2, 3, device=DEVICE, requires_grad=True) for _ in range(2))
    coefficients = torch.randn(2, 3, 5, device=DEVICE, requires_grad=True)
    skip = torch.randn(3, device=DEVICE, requires_grad=True)
    arguments = (u, heights, weight, skip, skip, None, [1, 2], 1e-5, False)
    torch.library.opcheck(torch.ops.mrconv.window_branch_sum.default, arguments, test_utils=CHECKS)
    arguments = (u, coefficients, weight, skip, skip, None, [4, 7], [4, 8], 1e-5, False)
    torch.library.opcheck(torch.ops.mrconv.mode_branch_sum.default, arguments, test_utils=CHECKS)
