"""Every op equals its reference, in values and gradients."""

import pytest
import torch

from mrconv import ops
from mrconv.ops import Algorithm, BranchWeights, Normalization, Taps, select
from mrconv.ops._common import cached_on_device
from mrconv.ops.branch_sum.statistics import cumulative_sum_by_doubling
from mrconv.ops.tap_conv import shifts

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
def test_fft_conv_with_bias_and_gelu(gelu):
    assert_same(
        lambda u, k, bias: ops.fft_conv(u, k, 3, bias, gelu),
        lambda u, k, bias: ops.fft_conv_reference(u, k, 3, bias, gelu),
        double(3, 4, 37),
        double(4, 9),
        double(4),
    )


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("expensive", [Algorithm.FFT, Algorithm.TAPS])
@pytest.mark.parametrize("gelu", [False, True])
def test_scattered_taps_equal_rolled_input(L, expensive, gelu, monkeypatch):
    monkeypatch.setattr(select, "cost", costs_more(expensive))
    lags = (0, -3, 7, 64, -200)
    assert_same(
        lambda u, v, bias: ops.conv(u, v, lags, bias, gelu),
        lambda u, v, bias: ops.conv_reference(u, v, lags, bias, gelu),
        double(3, 4, L),
        double(4, 5),
        double(4),
    )


@pytest.mark.parametrize("expensive", [Algorithm.FFT, Algorithm.TAPS])
@pytest.mark.parametrize("gelu", [False, True])
def test_conv_treats_positions_past_the_lengths_as_absent(expensive, gelu, monkeypatch):
    monkeypatch.setattr(select, "cost", costs_more(expensive))
    lags, lengths = (0, -3, 7, 64), torch.tensor([63, 0, 20])
    padding = (torch.arange(63) >= lengths[:, None])[:, None]

    def reference(u, v, bias):
        return ops.conv_reference(u.masked_fill(padding, 0), v, lags, bias, gelu).masked_fill(padding, 0)

    assert_same(
        lambda u, v, bias: ops.conv(u, v, lags, bias, gelu, lengths=lengths),
        reference,
        double(3, 4, 63).masked_fill(padding, float("nan")),
        double(4, 4),
        double(4),
    )


def test_a_kernel_spectrum_can_be_reused():
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


def costs_more(expensive):
    """Return costs at which this algorithm is not selected if there is another one."""
    return lambda u, triton, algorithm, problem: float(algorithm is expensive)


CASES = [(lags, Algorithm.SPECTRAL) for lags in DENSE + SCATTERED] + [(lags, Algorithm.TAPS) for lags in SCATTERED]


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize(
    ("lags", "expensive"), CASES, ids=lambda x: x if isinstance(x, str) else f"{len(x)}x{type(x[0]).__name__}"
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_branch_sum_equals_all_branches(L, lags, expensive, masked, skipped, monkeypatch):
    monkeypatch.setattr(select, "cost", costs_more(expensive))
    u, weight = double(3, 4, L) + 0.3, double(len(lags), 4)
    others = [double(4), double(len(lags), 4), double(len(lags), 4)] if skipped else []
    lengths = torch.tensor([L, 1, (L + 1) // 2]) if masked else None
    mask = torch.arange(L) < (torch.tensor([L] * 3) if lengths is None else lengths)[:, None]

    def run(f):
        def call(u, weight, *rest):
            taps = [Taps(*kernel) for kernel in zip(rest[: len(lags)], lags, strict=True)]
            skip, gamma, beta = rest[len(lags) :] or (None, None, None)
            normalization = Normalization([BranchWeights(weight, gamma, beta)], skip, lengths)
            y, *moments = f(u * mask[:, None], taps, normalization)
            statistics.append(moments)
            return y * mask[:, None]

        return call

    statistics = []
    tensors = u, weight, *(double(4, len(at)) for at in lags), *others
    assert_same(run(ops.branch_sum), run(ops.branch_sum_reference), *tensors, tolerance=1e-9)
    for fast, reference in zip(*statistics, strict=True):
        assert torch.allclose(fast, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 30, 150, 10**6])
def test_taps_do_not_depend_on_the_slice_size(size, monkeypatch):
    monkeypatch.setattr(shifts, "SLICE", size)
    lags = [(0, 3), (-1, -2, 40)]

    def run(f):
        return lambda u, a, b, w, d: f(u.transpose(1, 2), [Taps(a, lags[0]), Taps(b, lags[1])], Normalization(w, d)).y

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


@pytest.mark.parametrize(("lengths", "T"), [((1, 2, 3), 1), ((8, 9, 33), 5), ((16,), 16)])
def test_synthesis_with_taps_equals_its_reference(lengths, T):
    index = torch.stack([torch.randperm(n)[:T] for n in lengths])
    scales = [0.5 + n for n in lengths]
    assert_same(
        lambda x, taps, weights: torch.cat(ops.synthesize_with_taps(x, taps, index, weights, lengths, scales), 1),
        lambda x, taps, weights: torch.cat(
            ops.synthesize_with_taps_reference(x, taps, index, weights, lengths, scales), 1
        ),
        double(len(lengths), 4, 3, 2),
        double(len(lengths), 4, T),
        double(2, len(lengths), 4),
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
def test_cumulative_sum_by_doubling(L):
    x = double(3, L)
    assert torch.allclose(cumulative_sum_by_doubling(x), x.cumsum(-1))


def learned(*shape):
    return torch.randn(*shape, requires_grad=True)


def branch_sum_tensors(kernels, branches, factors=False):
    """Return u, the kernels, weights of two directions, skip, lengths, eps, sync and factors of a branch sum."""
    lengths = torch.tensor([9, 4])
    weights = (x for n in (1, branches - 1) for x in (learned(n, 3), learned(3 * n), learned(3 * n)))
    return learned(2, 3, 9), kernels, *weights, learned(3), lengths, 1e-5, False, factors


def synthesis_arguments(device, triton):
    """Return the arguments of the op of synthesis, with two directions and scattered taps."""
    shapes = [(2, 3, 4, 2), (2, 2, 3), (2, 3, 2)]
    tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes for _ in range(2)]
    index = [torch.tensor([[0, 3], [7, 2]], device=device) for _ in range(2)]
    return *tensors, *index, [6, 12] * 2, [6, 9] * 2, [1.0, 2.0] * 2, triton


OPCHECKS = {
    "fft_conv": lambda: (learned(2, 3, 9), learned(3, 5), learned(3), None, torch.tensor([9, 4]), 2, True, False),
    "tap_conv": lambda: (learned(2, 3, 9), learned(3, 2), learned(3), [0, -4], True, False),
    "branch_sum_spectral": lambda: (*branch_sum_tensors(learned(3, 9), 3, True), [2, 4, 3], 2, False),
    "branch_sum_taps": lambda: (*branch_sum_tensors(learned(3, 3), 2), [0, 1, -4], [1, 2], False),
    "synthesize": lambda: synthesis_arguments("cpu", False),
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
    y, mean, var, _ = ops.branch_sum(u, [Taps(k, range(20))], Normalization(torch.ones(1, 3)))
    assert y.dtype == dtype
    assert mean.dtype == var.dtype == torch.float32


def test_non_contiguous_inputs_give_the_same():
    u = double(2, 50, 4).transpose(1, 2)
    k = double(20, 4).t()
    assert torch.equal(ops.fft_conv(u, k), ops.fft_conv(u.contiguous(), k.contiguous()))
    normalization = Normalization(double(1, 4))
    strided = ops.branch_sum(u, [Taps(k, range(20))], normalization)
    assert torch.equal(strided.y, ops.branch_sum(u.contiguous(), [Taps(k.contiguous(), range(20))], normalization).y)
    assert torch.equal(ops.tap_conv(u, k, range(20)), ops.tap_conv(u.contiguous(), k.contiguous(), range(20)))


def test_float32_statistics_stay_accurate_at_length_16384():
    u = torch.randn(2, 3, 16384)
    kernels = [torch.randn(3, n) / n**0.5 for n in (1, 128, 16384)]

    def run(dtype):
        taps = [Taps(k.to(dtype), range(k.shape[1])) for k in kernels]
        return ops.branch_sum(u.to(dtype), taps, Normalization(torch.ones(3, 3, dtype=dtype)))

    exact, single = run(torch.float64), run(torch.float32)
    assert torch.allclose(single.var.double(), exact.var, rtol=2e-6)
    assert (single.y.double() - exact.y).norm() < 2e-6 * exact.y.norm()


def test_eager_calls_and_registered_ops_agree():
    u, kernel = learned(2, 3, 9), learned(3, 5)
    y, grads = gradients(lambda u, k: ops.fft_conv(u, k), u.detach(), kernel.detach())
    op = torch.ops.mrconv.fft_conv.default
    z, others = gradients(lambda u, k: op(u, k, None, None, None, 0, False, False), u.detach(), kernel.detach())
    assert all(torch.equal(a, b) for a, b in zip((y, *grads), (z, *others), strict=True))


def test_running_statistics_change_their_version():
    running = ops.RunningStatistics(torch.zeros(3), torch.ones(3), torch.tensor(0))
    versions = [x._version for x in running]
    ops.update_running_statistics([running], torch.ones(3), torch.ones(3), torch.tensor(4.0), 0.1)
    assert all(x._version > before for x, before in zip(running, versions, strict=True))


def test_constants_that_a_cuda_graph_captures_are_never_evicted(monkeypatch):
    @cached_on_device(maxsize=2)
    def make(value, device):
        return torch.tensor(value, device=device)

    device = torch.device("cpu")
    with torch.inference_mode():
        first, second = make(1, device), make(2, device)
    assert not first.is_inference()
    assert make(1, device) is first
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert make(1, device) is first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for value in (3, 4, 5):
        make(value, device)
    assert make(1, device) is first
    assert make(2, device) is not second
