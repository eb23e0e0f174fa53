"""The streaming outputs of a layer equal those of the parallel form."""

import copy

import pytest
import torch

from mrconv import MRConv, register_kernel
from mrconv.kernels.dense import DenseKernel

from ..conftest import randomise, relative
from .helpers import CHUNKS, L_MAX, LAYERS, build, double, streamed


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_steps_and_chunks_equal_the_parallel_output(name, merged, chunks):
    layer, u = build(name, merged), double(2, 10 * L_MAX, 4)
    assert relative(streamed(layer, u, CHUNKS[chunks])[0], layer(u)) < 1e-13


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("merged", [False, True])
def test_float32_stays_close_to_float64(name, merged):
    exact, u = build(name), double(2, 10 * L_MAX, 4)
    layer = copy.deepcopy(exact).float()
    layer = layer.reparameterize() if merged else layer
    for chunks in ("steps", "31"):
        assert relative(streamed(layer, u.float(), CHUNKS[chunks])[0].double(), exact(u)) < 2e-6


@pytest.mark.parametrize("name", ["fourier", "constant", "dense", "fourier concat"])
@pytest.mark.parametrize("chunks", ["steps", "31"])
def test_rounding_errors_do_not_accumulate(name, chunks):
    layer = build(name, dtype=torch.float32)
    u = 1 + torch.randn(1, 100 * L_MAX, 4)  # a nonzero mean, with which a running sum would lose digits
    y = copy.deepcopy(layer).double()(u.double())
    errors = (streamed(layer, u, CHUNKS[chunks])[0].double() - y).abs()
    assert errors[:, -L_MAX:].max() < 3 * errors[:, L_MAX : 20 * L_MAX].max()
    assert errors.max() / y.abs().mean() < 1e-5


def test_errors_in_the_sums_vanish_after_two_windows():
    layer = build("fourier")
    u = double(1, 3 * 48, 4)
    y = layer(u)
    for sizes in ((1,), (7,), (31, 1)):
        state = layer.initial_state(1)
        state.modes[:, 0] += 1  # an accumulated rounding error
        assert relative(streamed(layer, u, sizes, state)[0][:, 96:], y[:, 96:]) < 1e-13


@pytest.mark.parametrize("l_max", [1, 2, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("kind", ["dense", "dilated", "fourier", "fourier+sparse"])
def test_any_reach(l_max, kind):
    layer = randomise(MRConv(3, l_max, kernel=kind, dtype=torch.float64)).eval()
    u = double(1, 333, 3)
    for sizes in ((1,), (5, 31, 1, 129)):
        assert relative(streamed(layer, u, sizes)[0], layer(u)) < 1e-13


@pytest.mark.parametrize("name", ["dense", "dilated", "fourier", "fourier+sparse", "heads and groups", "lower rate"])
@pytest.mark.parametrize("length", [1, 5, 40, 65, 300])
def test_a_prompt_then_steps(name, length):
    layer, u = build(name), double(2, length + 60, 4)
    first, state = layer.prefill(u[:, :length])
    rest, _ = streamed(layer, u[:, length:], (1,), state)
    assert relative(torch.cat([first, rest], 1), layer(u)) < 1e-13


def test_the_state_holds_the_rate():
    layer, u = build("fourier"), double(2, 200, 4)
    for rate in (0.5, 1.3):
        y, state = layer.prefill(u[:, :101], rate=rate)
        rest, _ = streamed(layer, u[:, 101:], (1, 9), state)
        assert relative(torch.cat([y, rest], 1), layer(u, rate=rate)) < 1e-13


@pytest.mark.parametrize("name", ["dense", "dilated", "fourier", "fourier+sparse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_and_autocast(name, dtype):
    layer = build(name, dtype=torch.float32)
    u = torch.randn(2, 150, 4, dtype=dtype)
    with torch.autocast("cpu", dtype):
        for sizes in ((1,), (31,), (100,)):
            y, _ = streamed(layer, u, sizes)
            assert y.dtype == dtype
            assert relative(y.double(), layer.float()(u.float()).double()) < 2 * torch.finfo(dtype).eps
    half = copy.deepcopy(layer).to(dtype)
    assert relative(streamed(half, u, (1, 13))[0].double(), half(u).double()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["dense", "dilated", "fourier", "fourier+sparse"])
def test_a_prompt_is_not_rounded_to_the_layers_dtype(name):
    layer, u = build(name, dtype=torch.bfloat16), torch.randn(2, 150, 4)
    with torch.inference_mode():
        first, state = layer.prefill(u[:, :50])
    rest, _ = streamed(layer, u[:, 50:], (1,), state)
    assert relative(torch.cat([first, rest], 1), layer(u)) < 1e-5
    state = build(name, dtype=torch.float32).prefill(u.bfloat16())[1]
    assert state.inputs.dtype == torch.float32


def test_changed_parameters_take_effect_at_once():
    for name in ("dense", "fourier", "dilated"):
        layer, u = build(name), double(1, 10, 4)
        layer.prefill(u)
        with torch.no_grad():
            layer.branches[0].alpha.mul_(2)
        assert relative(streamed(layer, u, (1,))[0], layer(u)) < 1e-13
        layer.branches[0].alpha.data.mul_(2)
        assert relative(streamed(layer, u, (1,))[0], layer(u)) < 1e-13


def test_a_custom_kernel_streams():
    @register_kernel("streamed test")
    class CustomKernel(DenseKernel):
        pass

    layer = randomise(MRConv(3, 40, kernel="streamed test", dtype=torch.float64)).eval()
    u = double(2, 90, 3)
    assert relative(streamed(layer, u, (1, 11))[0], layer(u)) < 1e-13


def test_streaming_in_and_out_of_inference_mode():
    for name in ("dense", "fourier+sparse"):
        layer, u = build(name), double(2, 90, 4)
        y = layer(u)
        with torch.inference_mode():
            first, state = layer.prefill(u[:, :50])
            state = state.copy()
        rest, state = layer.stream(u[:, 50:], state)
        assert relative(torch.cat([first, rest], 1), y) < 1e-13
        assert not rest.requires_grad


def test_layers_and_states_that_cannot_stream_are_rejected():
    with pytest.raises(ValueError, match="bidirectional"):
        build("fourier", bidirectional=True).initial_state(1)
    with pytest.raises(ValueError, match="bidirectional"):
        build("fourier", merged=True, bidirectional=True).initial_state(1)
    layer = build("fourier")
    state = layer.initial_state(2)
    with pytest.raises(ValueError, match="training mode"):
        layer.train().initial_state(1)
    with pytest.raises(ValueError, match="training mode"):
        layer.step(double(2, 4), state)
    layer.eval()
    with pytest.raises(ValueError, match="2 sequences"):
        layer.step(double(3, 4), state)
    with pytest.raises(ValueError, match="d_model = 4"):
        layer.step(double(2, 5), state)
    with pytest.raises(ValueError, match="batch must be"):
        layer.initial_state(0)
    with pytest.raises(ValueError, match=r"rate=0\.5 needs a continuous kernel"):
        build("dense").initial_state(1, rate=0.5)
    with pytest.raises(ValueError, match="before merging"):
        layer.reparameterize().step(double(2, 4), state)


@pytest.mark.parametrize("name", ["few modes", "few modes concat"])
def test_a_layer_merged_into_modes_streams_by_its_modes(name):
    trained, u = build(name), double(2, 3 * L_MAX, 4)
    merged = copy.deepcopy(trained).reparameterize()
    assert merged.low_rank
    expected, state = streamed(trained, u, (1,))
    assert relative(streamed(merged, u, (1,))[0], expected) < 1e-13
    assert merged.initial_state(2).modes.shape == state.modes.shape  # a step costs as much as before merging
    y, state = merged.step(u[:, 0], state)
    assert relative(y, trained.step(u[:, 0], streamed(trained, u, (1,))[1])[0]) < 1e-13
    assert merged.reparameterize(dense=True).initial_state(2).modes is None


def test_a_layer_without_batch_statistics_streams_in_training_mode():
    layer, u = build("scale").train(), double(2, 90, 4)
    assert relative(streamed(layer, u, (1, 11))[0], layer(u)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("name", ["constant", "fourier", "dense", "fourier+sparse"])
def test_long_windows(name):
    options = {"d_model": 2, "l_max": 6011} | LAYERS[name]
    layer = randomise(MRConv(dtype=torch.float32, **options)).eval()
    u = torch.randn(1, 60_110, 2)
    y = copy.deepcopy(layer).double()(u.double())
    for sizes in ((1,), (1, 700, 7, 5000)):
        assert relative(streamed(layer, u, sizes)[0].double(), y) < 2e-6
