"""Triton kernels == the float64 reference: values and gradients, odd shapes, strides, padding, poisoned outputs."""

import copy

import pytest
import torch

from mrconv import MRConv, ops
from mrconv.ops import Algorithm, BranchWeights, ModeKernels, Normalization, Selection, Taps

from ..conftest import randomise, relative, slow_except, training_step
from .helpers import DEVICE, LENGTHS, assert_same, double, inputs, masked_sum

pytest.importorskip("triton")
correlation = pytest.importorskip("mrconv.ops.tap_conv.correlation_triton")
tap_gradients = pytest.importorskip("mrconv.ops.branch_sum.taps_triton")
tap_layout = tap_gradients.tap_layout


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_tap_conv(L, channels_last):
    lags = (0, -3, 7, 64, -200)
    u, _, _ = inputs(L, channels_last, False)
    assert_same(
        lambda u, v: ops.tap_conv(u, v, lags, backend="triton"),
        lambda u, v: ops.tap_conv_reference(u, v, lags),
        u,
        double(5, 5),
    )


FEW, MANY = [(0,), (0, 2), (), (5, 70), (-1, -4)], [tuple(range(-3, 40, 2)), (), (7,), tuple(range(0, 90, 5))]
DILATED = [(0, 1, 2), (0, 30, 60, 90), (-1, -21, -41)]


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("lags", [FEW, MANY, DILATED], ids=["few", "many", "dilated"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_tap_branches(L, lags, channels_last, masked, monkeypatch):
    monkeypatch.setattr(correlation, "MAX_PARTS", 2)
    monkeypatch.setattr(tap_gradients, "SEGMENT_PARTS", 2)
    monkeypatch.setattr(tap_gradients, "SCRATCH_BYTES", 2 * 5 * L * len(lags) * 8)  # slices of 2 and of 1
    check_branches(lags, not masked, *inputs(L, channels_last, masked))


def test_branches_with_few_differences_of_lags_are_not_computed():
    layouts = [tap_layout(tuple(sum(lags, ())), tuple(map(len, lags)), 130, False) for lags in (FEW, DILATED, MANY)]
    assert [layout.outside for layout in layouts] == [True, True, False]


def test_tap_branches_of_many_channels():
    u = double(2, 70, 40)[:, 1::2]
    check_branches([(0, 1, 2), (0, 3, 6, 50)], False, u, None, torch.ones(2, 1, 40, dtype=torch.bool))


def check_branches(lags, skipped, u, lengths, mask):
    C = u.shape[1]

    def run(f, *selection):
        def call(u, weight, skip, beta, *values):
            taps = [Taps(*branch) for branch in zip(values, lags, strict=True)]
            return masked_sum(f, u, taps, weight, (skip, beta) if skipped else (), lengths, mask, *selection)

        return call

    values = [double(C, len(at)) for at in lags]
    fast, reference = run(ops.branch_sum, Selection(Algorithm.TAPS, True)), run(ops.branch_sum_reference)
    assert_same(fast, reference, u, double(len(lags), C), double(C), double(len(lags), C), *values)


@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
@pytest.mark.parametrize(
    ("kernel", "kernel_size", "bidirectional", "masked"),
    slow_except(
        [
            *(("fourier", 1, False, masked) for masked in (False, True)),
            *(("dilated", 4, False, masked) for masked in (False, True)),
            ("sparse", 4, True, True),
            ("fourier", 4, True, True),
        ],
        ("fourier", 1, False, True),
        ("dilated", 4, False, False),
        ("fourier", 4, True, True),
    ),
)
def test_layers_in_lower_precision_match_float64(dtype, kernel, kernel_size, bidirectional, masked):
    options = {"kernel": kernel, "kernel_size": kernel_size, "bidirectional": bidirectional}
    exact = randomise(MRConv(3, 50, **options, backend="reference", dtype=torch.float64))
    layer = copy.deepcopy(exact).float().to(DEVICE)
    layer.backend = "triton"
    u = torch.randn(2, 45, 3, dtype=torch.float64).to(dtype).double()
    lengths = torch.tensor([45, 2]) if masked else None
    y, du, grads = training_step(exact, u, lengths=lengths)
    z, dz, gpu_grads = training_step(layer, u.to(DEVICE, dtype), lengths=lengths)
    half = 1e-2 if DEVICE == "cpu" else 5e-3  # Triton's interpreter truncates to half precision
    tolerance = 2e-6 if dtype == torch.float32 else half
    largest = max(g.norm() for g in grads.values())
    assert z.dtype == dtype
    assert relative(z.double().cpu(), y) < tolerance
    assert relative(dz.double().cpu(), du) < 2 * tolerance
    for name, g in grads.items():
        assert (gpu_grads[name].double().cpu() - g).norm() < 4 * tolerance * largest, name
    z = layer.eval()(u.to(DEVICE, dtype))
    assert relative(z.double().cpu(), exact.eval()(u)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 1},
        {"kernel_size": 4, "bidirectional": True},
        {"kernel_size": 4, "heads": 2},
        {"kernel_size": 4, "groups": 7},
        {"kernel": "dilated", "kernel_size": 4},
        {"kernel": "sparse", "kernel_size": 16},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@torch.no_grad()
def test_merged_layers_with_lengths_equal_their_branches(options, dtype):
    exact = randomise(MRConv(7, 70, **options, backend="reference", dtype=torch.float64)).eval()
    merged = copy.deepcopy(exact).reparameterize().to(DEVICE, dtype)
    merged.backend = "triton"
    for lengths in (torch.tensor([67, 0, 30]), torch.tensor([61, 2, 30])):
        u = torch.randn(3, 67, 7, dtype=torch.float64).to(dtype)
        padding = torch.arange(67) >= lengths[:, None]
        u[padding] = float("nan")
        expected = exact(u.double(), lengths, gelu=True)
        for on_device in (True, False):  # from the CPU the longest length is known
            y = merged(u.to(DEVICE), lengths.to(DEVICE) if on_device else lengths, gelu=True)
            assert y.dtype == dtype
            assert not y.cpu()[padding].any()
            assert relative(y.double().cpu(), expected) < {8: 1e-9, 4: 2e-6, 2: 2e-2}[dtype.itemsize]


@pytest.mark.parametrize(
    "algorithm",
    [Algorithm.TAPS, Algorithm.MOVING_SUM, Algorithm.MOVING_MODES, Algorithm.SPECTRAL, Algorithm.TOEPLITZ],
)
def test_weights_skip_and_lengths_may_be_strided(algorithm):
    u, lengths, mask = inputs(63, True, True)
    u, lengths, values = (x.to(DEVICE) for x in (u * mask, lengths, double(5, 8)))
    u = u.bfloat16() if algorithm is Algorithm.TOEPLITZ else u
    both_directions = [Taps(values, range(8)), Taps(values, range(-1, -9, -1))]
    kernels = {
        Algorithm.TAPS: [Taps(values[:, :4], (0, 1, 2, 3)), Taps(values[:, 4:], (0, 4, 9, 20))],
        Algorithm.MOVING_SUM: [Taps(values[:, :1], range(3)), Taps(values[:, 1:2], range(50))],
        Algorithm.MOVING_MODES: ModeKernels(values.view(5, 2, 4)[:, :, :3].transpose(0, 1), [4, 8], [4, 8]),
        Algorithm.SPECTRAL: both_directions,
        Algorithm.TOEPLITZ: both_directions,
    }[algorithm]

    def run(*rest):
        *weights, skip, lengths = rest
        normalization = Normalization([BranchWeights(*weights)], skip, lengths)
        return ops.branch_sum(u, kernels, normalization, Selection(algorithm, True))

    rest = [*(double(2, 5).to(DEVICE) for _ in range(3)), double(5).to(DEVICE), lengths]
    strided = [torch.stack([x, torch.zeros_like(x)], -1)[..., 0] for x in rest]
    for a, b in zip(run(*rest), run(*strided), strict=True):
        assert torch.equal(a * mask.to(DEVICE) if a.ndim == 3 else a, b * mask.to(DEVICE) if b.ndim == 3 else b)


def test_ops_are_registered_correctly():
    u = torch.randn(2, 3, 9, device=DEVICE, requires_grad=True)
    values = torch.randn(3, 2, device=DEVICE, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    weight, skip = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3), (3,)))
    torch.library.opcheck(torch.ops.mrconv.tap_conv.default, (u, values, skip, [0, 4], True, True), test_utils=checks)
    arguments = (u, values, weight, *[None] * 5, skip, None, 1e-5, False, True, [0, 4], [1, 1], True)
    torch.library.opcheck(torch.ops.mrconv.branch_sum_taps.default, arguments, test_utils=checks)


def test_more_sequences_than_a_grid_has_programs_raise():
    u = torch.zeros(2**16, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="at most 65,535 sequences at once on a GPU; got 65,536"):
        ops.tap_conv(u, torch.ones(1, 1, device=DEVICE), [0], backend="triton")
