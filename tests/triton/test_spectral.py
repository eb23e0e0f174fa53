"""The spectral algorithms by Triton == the float64 reference: odd batches and lengths, strides, padding, slices."""

import pytest
import torch

from mrconv import ops
from mrconv.ops import Algorithm, Selection, Taps
from mrconv.ops.branch_sum import circle_triton, spectral_triton
from mrconv.ops.fft_conv import triton_kernels as fft_triton

from ..conftest import slow_except
from ..ops.test_ops import synthesis_arguments
from .helpers import DEVICE, LENGTHS, assert_same, double, inputs, masked_sum, with_nan_padding, zero_padding


@pytest.fixture
def _slices(request, monkeypatch):
    """Whole batches and FFTs at some lengths, one pair at a time and FFTs in four rows at others."""
    if request.node.callspec.params["L"] in (2, 63):
        monkeypatch.setattr(fft_triton.TritonEngine, "slice_bytes", 1)
        monkeypatch.setattr(fft_triton, "MAX_PAIRS", 1)
        monkeypatch.setattr(fft_triton, "WHOLE", 16)
        monkeypatch.setattr(circle_triton, "SLICE_BYTES", 1)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("B", [1, 3, 4])
@pytest.mark.parametrize(("K", "lead", "gelu"), [(1, 0, False), (5, 2, True), (130, 0, False), (130, 130, True)])
def test_fft_conv(L, B, K, lead, gelu):
    assert_same(
        lambda u, k, bias: ops.fft_conv(u.transpose(1, 2), k, lead, bias, gelu, "triton"),
        lambda u, k, bias: ops.fft_conv_reference(u.transpose(1, 2), k, lead, bias, gelu),
        double(B, L, 5),
        double(5, K),
        double(5),
    )


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("B", [1, 3, 4])
@pytest.mark.parametrize(("K", "lead", "gelu"), [(5, 2, True), (130, 0, False), (130, 130, True)])
def test_fft_conv_with_lengths(L, B, K, lead, gelu):
    lengths = torch.tensor([(L + 1) // 2, L, 0, L // 3], dtype=torch.int32 if gelu else torch.int64)[:B]
    u = with_nan_padding(double(B, L, 5).transpose(1, 2) if gelu else double(B, 5, L), lengths)

    def reference(u, k, bias):
        return zero_padding(ops.fft_conv_reference(zero_padding(u, lengths), k, lead, bias, gelu), lengths)

    for backend in ("triton", "torch"):
        given = {"backend": backend, "lengths": torch.stack([lengths, lengths], 1).to(DEVICE)[:, 0]}
        assert_same(
            lambda u, k, bias, given=given: ops.fft_conv(u, k, lead, bias, gelu, **given),
            reference,
            u,
            double(5, K),
            double(5),
        )


BRANCHES = [
    [range(1), range(2), range(4), range(8), range(16), range(128)],
    [range(3), range(6), range(12), range(-1, -4, -1), range(-1, -7, -1), range(-1, -150, -1)],
    [range(-1, -4, -1), range(-1, -13, -1), range(-1, -20, -1)],
]


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("L", slow_except(LENGTHS, 63, 130))
@pytest.mark.parametrize("lags", BRANCHES, ids=["causal", "bidirectional", "anticausal"])
@pytest.mark.parametrize(("masked", "channels_last", "skipped"), [(False, True, True), (True, False, False)])
@pytest.mark.parametrize("short", [0, 8, 512])
def test_branch_sum(L, lags, masked, channels_last, skipped, short, monkeypatch):
    monkeypatch.setattr(spectral_triton, "SHORT", short)
    monkeypatch.setattr(spectral_triton, "RELATIVE", 100)
    monkeypatch.setattr(circle_triton, "SPLITS", 2)  # fewer programs, for the interpreter
    u, lengths, mask = inputs(L, channels_last, masked)
    values = [double(5, len(at)) for at in lags]

    def run(f, *selection):
        def call(u, weight, *rest):
            taps = [Taps(*kernel) for kernel in zip(rest[: len(lags)], lags, strict=True)]
            return masked_sum(f, u, taps, weight, rest[len(lags) :], lengths, mask, *selection)

        return call

    fast, reference = run(ops.branch_sum, Selection(Algorithm.SPECTRAL, True)), run(ops.branch_sum_reference)
    skip_and_beta = [double(5), double(len(lags), 5)] if skipped else []
    assert_same(fast, reference, u, double(len(lags), 5), *values, *skip_and_beta)


@pytest.mark.parametrize(("scaled", "skipped"), [(True, False), (False, True)])
@pytest.mark.parametrize("lags", [BRANCHES[1], [range(9), range(9, 12), range(-1, -3, -1), range(-3, -9, -1)]])
def test_merge(lags, scaled, skipped):
    ahead, behind = (150, 12) if lags is BRANCHES[1] else (9, 20)

    def run(backend):
        def call(scale, skip, *values):
            kernels = [Taps(*kernel) for kernel in zip(values, lags, strict=True)]
            return ops.merge(kernels, ahead, behind, scale if scaled else None, skip if skipped else None, backend)[0]

        return call

    assert_same(run("triton"), run("torch"), double(len(lags), 5), double(5), *(double(5, len(at)) for at in lags))


@pytest.mark.parametrize("lengths", [(1, 2, 3), (8, 16, 130), (5, 10, 300)])
@pytest.mark.parametrize("M", [1, 2, 5, 9])
def test_synthesize(lengths, M):
    scales = [0.5, 1.0, 3.0]
    assert_same(
        lambda modes: torch.cat(ops.synthesize(modes, lengths, scales, "triton"), 1),
        lambda modes: torch.cat(ops.synthesize_reference(modes, lengths, scales), 1),
        double(3, 20, M, 2),
    )


@pytest.mark.parametrize(("lengths", "M", "T"), [((2, 70, 3), 3, 2), ((100, 65, 130), 40, 65)])
def test_synthesize_with_taps(lengths, M, T):
    scales, index = [0.5, 1.0, 3.0], torch.stack([torch.randperm(n)[:T] for n in lengths])
    assert_same(
        lambda *x: torch.cat(synthesize_with_taps(ops.synthesize_with_taps, x, index, lengths, scales, "triton"), 1),
        lambda *x: torch.cat(synthesize_with_taps(ops.synthesize_with_taps_reference, x, index, lengths, scales), 1),
        double(3, 20, M, 2),
        double(3, 20, T),
        double(2, 3, 20),
    )


def synthesize_with_taps(f, tensors, index, *options):
    modes, taps, weights = tensors
    return f(modes, taps, index.to(modes.device), weights, *options)


@pytest.mark.parametrize("mixed", [False, True])
def test_kernels_of_both_directions_are_cut_and_packed(mixed):
    lengths, counts, scales = (4, 70) * 2, (4, 33) * 2, (0.5, 3.0) * 2
    index = [torch.tensor([[0, 3], [69, 32]]), torch.tensor([[1, 2], [33, 65]])]

    def packed(modes, modes2, taps, taps2, *weights):
        each = zip(weights, (taps, taps2), (at.to(modes.device) for at in index), strict=True)
        mixtures = [ops.Mixture(*mixture) for mixture in each] if mixed else []
        return ops.synthesize_packed([modes, modes2], lengths, counts, scales, mixtures, "triton")

    def reference(modes, modes2, taps, taps2, *weights):
        kernels = []
        for d, both in enumerate(((modes, taps), (modes2, taps2))):
            mixture = (both[1], index[d], weights[d])
            whole = ops.synthesize_with_taps_reference if mixed else ops.synthesize_reference
            kernels += whole(both[0], *(mixture if mixed else ()), lengths[:2], scales[:2])
        return torch.cat([kernel[:, :count] for kernel, count in zip(kernels, counts, strict=True)], 1)

    shapes = [(2, 35, 3, 2)] * 2 + [(2, 35, 2)] * 2 + [(2, 2, 35)] * 2
    if mixed:
        assert_same(packed, reference, *(double(*shape) for shape in shapes))
    else:
        others = [double(*shape) for shape in shapes[2:]]
        assert_same(
            lambda *x: packed(*x, *(y.to(DEVICE) for y in others)),
            lambda *x: reference(*x, *others),
            *(double(*shape) for shape in shapes[:2]),
        )


def test_ops_are_registered_correctly():
    u, kernel = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3, 9), (3, 7)))
    weight, skip = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3), (3,)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (u, kernel, skip, None, torch.tensor([9, 4], device=DEVICE), 2, True, True)
    torch.library.opcheck(torch.ops.mrconv.fft_conv.default, arguments, test_utils=checks)
    torch.library.opcheck(torch.ops.mrconv.synthesize.default, synthesis_arguments(DEVICE, True), test_utils=checks)
    arguments = (u, kernel, weight, *[None] * 5, skip, None, 1e-5, False, True, [3, 4], 1, True)
    torch.library.opcheck(torch.ops.mrconv.branch_sum_spectral.default, arguments, test_utils=checks)
