"""Triton kernels == the float64 reference: values and gradients, odd shapes, strides, padding, poisoned outputs."""

import copy

import pytest
import torch

from mrconv import MRConv, ops

from ..conftest import gradients, randomise, relative, training_step

pytest.importorskip("triton")
taps_triton = pytest.importorskip("mrconv.ops.tap_conv.triton_kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1, 2, 63, 130]


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Fill what is allocated with NaN, so that an element no program writes is seen."""
    for owner, name in ((torch, "empty_like"), (torch, "empty"), (torch.Tensor, "new_empty")):
        allocate = getattr(owner, name)

        def poisoned(*args, allocate=allocate, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

        monkeypatch.setattr(owner, name, poisoned)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def inputs(L, channels_last, masked, B=3, C=5):
    u = double(B, C, L) + 0.3
    if channels_last:
        u = u.transpose(1, 2).contiguous().transpose(1, 2)
    lengths = torch.tensor([L, 1, (L + 1) // 2])[:B] if masked else None
    mask = torch.arange(L) < (torch.full((B,), L) if lengths is None else lengths)[:, None]
    return u, lengths, mask[:, None]


def assert_same(f, reference, *tensors, tolerance=1e-9):
    """Compare f on the device with the reference on the CPU."""
    y, grads = gradients(f, *(x.to(DEVICE) for x in tensors))
    expected, expected_grads = gradients(reference, *tensors)
    for a, b in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert (a.cpu() - b).norm() <= tolerance * b.norm().clamp(min=1)


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


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("lags", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_tap_branches(L, lags, channels_last, masked, monkeypatch):
    monkeypatch.setattr(taps_triton, "SPAN", 64)
    monkeypatch.setattr(taps_triton, "SCRATCH", 2 * 5 * L * len(lags) * 8)  # slices of 2 and of 1
    check_branches(lags, not masked, *inputs(L, channels_last, masked))


def test_tap_branches_of_many_channels():
    u = double(2, 70, 40)[:, 1::2]
    check_branches([(0, 1, 2), (0, 3, 6, 50)], False, u, None, torch.ones(2, 1, 40, dtype=torch.bool))


def check_branches(lags, skipped, u, lengths, mask):
    C = u.shape[1]

    def run(f, **kwargs):
        def call(u, weight, skip, bias, *values):
            here = mask.to(u.device)
            ends = None if lengths is None else lengths.to(u.device)
            taps = list(zip(values, lags, strict=True))
            y, *_ = f(u * here, taps, weight, *((skip, bias) if skipped else (None, None)), ends, **kwargs)
            return y * here

        return call

    values = [double(C, len(at)) for at in lags]

    def taps(u, branches, *rest, **kwargs):
        values, lags = torch.cat([v for v, _ in branches], 1), [lag for _, at in branches for lag in at]
        return ops.tap_branch_sum(u, values, lags, [len(at) for _, at in branches], *rest, **kwargs)

    fast, plain = run(taps, backend="triton"), run(ops.branch_sum_reference)
    assert_same(fast, plain, u, double(len(lags), C), double(C), double(C), *values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kernel", "kernel_size", "bidirectional", "masked"),
    [
        *(("fourier", 1, False, masked) for masked in (False, True)),
        *(("dilated", 4, False, masked) for masked in (False, True)),
        ("sparse", 4, True, True),
        ("fourier", 4, True, True),
    ],
)
def test_layers_in_lower_precision_match_float64(dtype, kernel, kernel_size, bidirectional, masked):
    options = {"kernel": kernel, "kernel_size": kernel_size, "bidirectional": bidirectional}
    exact = randomise(MRConv(7, 50, **options, backend="reference", dtype=torch.float64))
    layer = copy.deepcopy(exact).float().to(DEVICE)
    layer.backend = "triton"
    u = torch.randn(3, 45, 7, dtype=torch.float64).to(dtype).double()
    lengths = torch.tensor([45, 2, 30]) if masked else None
    y, du, grads = training_step(exact, u, lengths=lengths)
    z, dz, gpu_grads = training_step(layer, u.to(DEVICE, dtype), lengths=lengths)
    half = 1e-2 if DEVICE == "cpu" else 5e-3  # Triton's interpreter does not round to half precision, it cuts bits off
    tolerance = 2e-6 if dtype == torch.float32 else half
    largest = max(g.norm() for g in grads.values())
    assert z.dtype == dtype
    assert relative(z.double().cpu(), y) < tolerance
    assert relative(dz.double().cpu(), du) < 2 * tolerance
    for name, g in grads.items():
        assert (gpu_grads[name].double().cpu() - g).norm() < 4 * tolerance * largest, name
    z = layer.eval()(u.to(DEVICE, dtype))
    assert relative(z.double().cpu(), exact.eval()(u)) < tolerance


@pytest.mark.parametrize("op", ["taps", "windows", "waves", "spectral", "toeplitz"])
def test_skip_bias_and_lengths_may_be_strided(op):
    u, lengths, mask = inputs(63, True, True)
    u, lengths, values, weight = (x.to(DEVICE) for x in (u * mask, lengths, double(5, 8), double(2, 5)))
    u = u.bfloat16() if op == "toeplitz" else u
    run = {
        "taps": lambda *rest: ops.tap_branch_sum(u, values, [0, 1, 2, 3, 0, 4, 9, 20], [4, 4], weight, *rest),
        "windows": lambda *rest: ops.window_branch_sum(u, weight, [3, 50], weight, *rest),
        "waves": lambda *rest: ops.mode_branch_sum(
            u, values.view(5, 2, 4)[:, :, :3].transpose(0, 1), [4, 8], [4, 8], weight, *rest
        ),
        "spectral": lambda *rest: ops.spectral_branch_sum(u, [values], [values], weight, *rest, backend="triton"),
        "toeplitz": lambda *rest: ops.toeplitz_branch_sum(u, [values], [values], weight, *rest),
    }[op]
    rest = [double(5).to(DEVICE), double(5).to(DEVICE), lengths]
    apart = [torch.stack([x, torch.zeros_like(x)], 1)[:, 0] for x in rest]
    for a, b in zip(run(*rest), run(*apart), strict=True):
        assert torch.equal(a * mask.to(DEVICE) if a.ndim == 3 else a, b * mask.to(DEVICE) if b.ndim == 3 else b)


def test_ops_are_registered_correctly():
    u = torch.randn(2, 3, 9, device=DEVICE, requires_grad=True)
    values = torch.randn(3, 2, device=DEVICE, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    weight, skip = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 3), (3,)))
    torch.library.opcheck(torch.ops.mrconv.tap_conv.default, (u, values, skip, [0, 4], True, True), test_utils=checks)
    arguments = (u, values, weight, skip, skip, None, [0, 4], [1, 1], 1e-5, False, True)
    torch.library.opcheck(torch.ops.mrconv.tap_branch_sum.default, arguments, test_utils=checks)


def test_more_sequences_than_a_grid_has_programs_are_refused():
    u = torch.zeros(2**16, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="at most 65,535 sequences at once on a GPU; got 65,536"):
        ops.tap_conv(u, torch.ones(1, 1, device=DEVICE), [0], backend="triton")
