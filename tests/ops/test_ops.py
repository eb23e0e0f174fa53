"""Every op equals its plain reference, in values and gradients."""

import pytest
import torch

from mrconv import ops
from mrconv.ops import select as dispatch
from mrconv.ops.branch_sum.statistics import _total_by_doubling
from mrconv.ops.tap_conv import op as taps

from ..conftest import gradients

LENGTHS = [1, 2, 63, 100]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def assert_same(f, reference, *inputs, tolerance=1e-11):
    y, grads = gradients(f, *inputs)
    expected, expected_grads = gradients(reference, *inputs)
    for a, b in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm().clamp(min=1)


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("K", [1, 5, 64, 130])
def test_fft_conv_equals_plain_fft(L, K):
    for lead in {0, 1, K // 2, K}:
        assert_same(
            lambda u, k, lead=lead: ops.fft_conv(u, k, lead),
            lambda u, k, lead=lead: ops.fft_conv_reference(u, k, lead),
            double(3, 4, L),
            double(4, K),
        )


@pytest.mark.parametrize("gelu", [False, True])
def test_fft_conv_with_its_epilogue(gelu):
    assert_same(
        lambda u, k, bias: ops.fft_conv(u, k, 3, bias, gelu),
        lambda u, k, bias: ops.fft_conv_reference(u, k, 3, bias, gelu),
        double(3, 4, 37),
        double(4, 9),
        double(4),
    )


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("op", ["taps", "fft"])
@pytest.mark.parametrize("gelu", [False, True])
def test_scattered_taps_equal_rolled_input(L, op, gelu, monkeypatch):
    monkeypatch.setattr(dispatch, "cost", dear("fft" if op == "taps" else "taps"))
    lags = (0, -3, 7, 64, -200)
    assert_same(
        lambda u, v, bias: ops.conv(u, v, lags, bias, gelu),
        lambda u, v, bias: ops.conv_reference(u, v, lags, bias, gelu),
        double(3, 4, L),
        double(4, 5),
        double(4),
    )


def test_a_kernel_s_spectrum_can_be_kept():
    u, kernel = double(2, 3, 37), double(3, 10)
    spectrum = ops.kernel_spectrum(u, kernel, 4)
    assert torch.equal(ops.fft_conv(u, kernel, 4, spectrum=spectrum), ops.fft_conv(u, kernel, 4))
    with pytest.raises(ValueError, match="not this kernel's for an input of length 20"):
        ops.fft_conv(u[..., :20], kernel, 4, spectrum=spectrum)


def test_fft_and_tap_convolution_agree():
    u, k = double(2, 3, 37), double(3, 10)
    assert torch.allclose(ops.fft_conv(u, k, 4), ops.tap_conv(u, k, range(-4, 6)), atol=1e-13)


DENSE = [
    [range(1), range(2), range(4), range(8), range(16)],
    [range(3), range(6), range(12), range(-1, -4, -1), range(-1, -7, -1), range(-1, -150, -1)],
    [range(64), range(128)],
    [range(1)],
]
SCATTERED = [[(0,), (0, 2), (), (5, 70)], [(0, 3), (-1, -2), (-1, -90)]]


def dear(*ops):
    """Prices at which none of these is chosen."""
    return lambda u, triton, op, reach, taps: float(op in ops)


CASES = [(lags, "tap sum") for lags in DENSE + SCATTERED] + [(lags, "spectral") for lags in SCATTERED]


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize(
    ("lags", "op"), CASES, ids=lambda x: x if isinstance(x, str) else f"{len(x)}x{type(x[0]).__name__}"
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_branch_sum_equals_all_branches(L, lags, op, masked, skipped, monkeypatch):
    others = ("spectral", "spectral both ways") if op == "tap sum" else ("tap sum",)
    monkeypatch.setattr(dispatch, "cost", dear(*others))
    u, weight = double(3, 4, L) + 0.3, double(len(lags), 4)
    skip = [double(4), double(4)] if skipped else []  # and bias
    lengths = torch.tensor([L, 1, (L + 1) // 2]) if masked else None
    mask = torch.arange(L) < (torch.tensor([L] * 3) if lengths is None else lengths)[:, None]

    def run(f):
        def call(u, weight, *rest):
            taps = list(zip(rest[: len(lags)], lags, strict=True))
            y, *statistics = f(u * mask[:, None], taps, weight, *rest[len(lags) :], lengths=lengths)
            found.append(statistics)
            return y * mask[:, None]

        return call

    found = []
    kernels = [double(4, len(at)) for at in lags]
    assert_same(run(ops.branch_sum), run(ops.branch_sum_reference), u, weight, *kernels, *skip, tolerance=1e-9)
    for fast, plain in zip(*found, strict=True):
        assert torch.allclose(fast, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 30, 150, 10**6])
def test_taps_give_the_same_in_slices_of_any_size(size, monkeypatch):
    monkeypatch.setattr(taps, "SLICE", size)
    lags = [(0, 3), (-1, -2, 40)]

    def run(f):
        return lambda u, a, b, w, d: f(u.transpose(1, 2), [(a, lags[0]), (b, lags[1])], w, d)[0]

    tensors = double(5, 13, 4), double(4, 2), double(4, 3), double(2, 4), double(4)
    assert_same(run(ops.branch_sum), run(ops.branch_sum_reference), *tensors, tolerance=1e-9)


@pytest.mark.parametrize("lengths", [(1, 2, 3), (8, 9, 33), (5,)])
@pytest.mark.parametrize("modes", [1, 2, 5])
def test_synthesis_equals_sum_of_cosines(lengths, modes):
    scales = [0.5 + n for n in lengths]
    assert_same(
        lambda x: torch.cat(ops.synthesize(x, lengths, scales), 1),
        lambda x: torch.cat(ops.synthesize_reference(x, lengths, scales), 1),
        double(len(lengths), 4, modes, 2),
    )


@pytest.mark.parametrize("n", [*range(1, 200), 1021, 4099, 16001, 100_003])
def test_fast_length_is_even_smooth_and_enough(n):
    m = ops.fast_length(n)
    assert n <= m <= max(2, 1.3 * n + 2)
    assert m % 2 == 0
    for p in (2, 3, 5):
        while m % p == 0:
            m //= p
    assert m == 1


@pytest.mark.parametrize("L", [*LENGTHS, 64])
def test_total_by_doubling_is_the_cumulative_sum(L):
    x = double(3, L)
    assert torch.allclose(_total_by_doubling(x), x.cumsum(-1))


OPCHECKS = {
    "fft_conv": lambda: (
        torch.randn(2, 3, 9, requires_grad=True),
        torch.randn(3, 5, requires_grad=True),
        torch.randn(3, requires_grad=True),
        None,
        2,
        True,
        False,
    ),
    "tap_conv": lambda: (
        torch.randn(2, 3, 9, requires_grad=True),
        torch.randn(3, 2, requires_grad=True),
        torch.randn(3, requires_grad=True),
        [0, -4],
        True,
        False,
    ),
    "branch_sum": lambda: (
        torch.randn(2, 3, 9, requires_grad=True),
        torch.randn(3, 9, requires_grad=True),
        torch.randn(3, 3, requires_grad=True),
        torch.randn(3, requires_grad=True),
        torch.randn(3, requires_grad=True),
        torch.tensor([9, 4]),
        [2, 4, 3],
        2,
        1e-5,
        False,
        False,
    ),
    "tap_branch_sum": lambda: (
        torch.randn(2, 3, 9, requires_grad=True),
        torch.randn(3, 3, requires_grad=True),
        torch.randn(2, 3, requires_grad=True),
        torch.randn(3, requires_grad=True),
        torch.randn(3, requires_grad=True),
        torch.tensor([9, 4]),
        [0, 1, -4],
        [1, 2],
        1e-5,
        False,
        False,
    ),
    "synthesize": lambda: (torch.randn(2, 3, 4, 2, requires_grad=True), [6, 12], [1.0, 2.0], False),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_op_is_registered_correctly(name):
    torch.library.opcheck(getattr(torch.ops.mrconv, name).default, OPCHECKS[name]())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    u, k = torch.randn(2, 3, 100).to(dtype), torch.randn(3, 20)
    y, (du, dk) = gradients(lambda u, k: ops.fft_conv(u, k), u, k)
    assert y.dtype == du.dtype == dtype
    assert dk.dtype == torch.float32
    assert torch.equal(y, ops.fft_conv(u.float(), k).to(dtype))
    assert torch.equal(ops.tap_conv(u, k, range(20)), ops.tap_conv(u.float(), k, range(20)).to(dtype))
    y, mean, var, _ = ops.branch_sum(u, [(k, range(20))], torch.ones(1, 3))
    assert y.dtype == dtype
    assert mean.dtype == var.dtype == torch.float32


def test_non_contiguous_inputs_give_the_same():
    u = double(2, 50, 4).transpose(1, 2)
    k = double(20, 4).t()
    assert torch.equal(ops.fft_conv(u, k), ops.fft_conv(u.contiguous(), k.contiguous()))
    weight = double(1, 4)
    strided = ops.branch_sum(u, [(k, range(20))], weight)
    assert torch.equal(strided[0], ops.branch_sum(u.contiguous(), [(k.contiguous(), range(20))], weight)[0])
    assert torch.equal(ops.tap_conv(u, k, range(20)), ops.tap_conv(u.contiguous(), k.contiguous(), range(20)))


def test_float32_statistics_stay_accurate_at_length_16384():
    u = torch.randn(2, 3, 16384)
    kernels = [torch.randn(3, n) / n**0.5 for n in (1, 128, 16384)]
    exact = ops.branch_sum(u.double(), [(k.double(), range(k.shape[1])) for k in kernels], torch.ones(3, 3).double())
    single = ops.branch_sum(u, [(k, range(k.shape[1])) for k in kernels], torch.ones(3, 3))
    assert torch.allclose(single[2].double(), exact[2], rtol=2e-6)
    assert (single[0].double() - exact[0]).norm() < 2e-6 * exact[0].norm()
