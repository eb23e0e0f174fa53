"""States are copied, reordered, reset, saved and moved."""

import pytest
import torch

from mrconv import SequenceClassifier
from mrconv.streaming.state import LayerState, PooledState

from ..conftest import randomise, relative
from .helpers import build, double, streamed

NAMES = ["dense", "dilated", "fourier", "fourier+sparse", "fourier concat", "heads and groups"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (31, 1, 100)])
def test_reset_sequences_restart_and_others_continue(name, merged, sizes):
    layer, u, later = build(name, merged), double(3, 77, 4), double(3, 150, 4)
    state = streamed(layer, u, (77,))[1].reset(torch.tensor([False, True, False]))
    y, _ = streamed(layer, later, sizes, state)
    assert relative(y[1:2], layer(later[1:2])) < 1e-13
    assert relative(y[::2], layer(torch.cat([u, later], 1))[::2, 77:]) < 1e-13


def test_reset_accepts_masks_and_indices():
    layer, u = build("fourier"), double(3, 20, 4)
    _, state = layer.prefill(u)
    for index in ([1], 1, torch.tensor([1]), torch.tensor([False, True, False])):
        reset = state.copy().reset(index)
        assert all(x[1].abs().max() == 0 for x in reset.tensors())
        assert all(torch.equal(x[::2], y[::2]) for x, y in zip(reset.tensors(), state.tensors(), strict=True))


def test_an_empty_index_is_valid():
    layer, u = build("fourier"), double(3, 20, 4)
    _, state = layer.prefill(u)
    for none in ([], torch.tensor([], dtype=torch.long)):
        reset = state.copy().reset(none)
        assert all(torch.equal(x, y) for x, y in zip(reset.tensors(), state.tensors(), strict=True))
        assert {len(x) for x in state.reorder(none).tensors()} == {0}


def test_a_state_keeps_its_dtypes():
    state = build("fourier", dtype=torch.float32).initial_state(2)
    for asked in ((torch.float16,), ("cpu", torch.float16), (torch.zeros(1, dtype=torch.float16),)):
        with pytest.raises(ValueError, match=r"the dtype of a state; got torch.float16 for a tensor of torch.float32"):
            state.to(*asked)
    assert [x.dtype for x in state.to("cpu").tensors()] == [torch.float32, torch.float64]


def test_reset_clears_nan():
    for name in NAMES:
        layer, u = build(name), double(2, 60, 4)
        _, state = layer.prefill(u * torch.tensor([1.0, torch.nan])[:, None, None].double())
        y, _ = streamed(layer, u, (1, 31), state.reset([1]))
        assert relative(y[1:], layer(u[1:])) < 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_reordered_sequences_are_independent(name):
    layer, u = build(name), double(2, 50, 4)
    _, state = layer.prefill(u)
    beams, later = [1, 0, 1], double(3, 70, 4)
    y, _ = streamed(layer, later, (1, 9), state.reorder(torch.tensor(beams)))
    assert relative(y, layer(torch.cat([u[beams], later], 1))[:, 50:]) < 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_resumes(name, tmp_path):
    layer, u = build(name), double(2, 120, 4)
    _, state = layer.prefill(u[:, :71])
    torch.save(state.state_dict(), tmp_path / "state.pt")
    layer.stream(u[:, :9], state)  # does not change the saved state
    loaded = LayerState.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    y, _ = streamed(layer, u[:, 71:], (1, 9), loaded)
    assert relative(y, layer(u)[:, 71:]) < 1e-13


def test_a_copy_is_independent_and_can_be_moved():
    layer, u = build("fourier+sparse"), double(2, 40, 4)
    _, state = layer.prefill(u)
    copy = state.copy()
    layer.step(u[:, 0], state)
    assert state.time == 41
    assert copy.time == 40
    assert not torch.equal(copy.modes, state.modes)
    assert {x.device.type for x in copy.to("meta").tensors()} == {"meta"}
    assert copy.nbytes == sum(x.numel() * 8 for x in (copy.inputs, copy.modes))
    assert all(not x.is_complex() and x.shape[0] == 2 for x in copy.tensors())


def test_nested_states_can_be_saved(tmp_path):
    model = SequenceClassifier(d_model=4, depth=2, l_max=30, d_input=2, n_classes=3, kernel_size=4, dtype=torch.float64)
    model, x = randomise(model).eval(), double(3, 60, 2)
    _, state = model.prefill(x[:, :31])
    torch.save(state.state_dict(), tmp_path / "state.pt")
    loaded = PooledState.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    y, _ = streamed(model, x[:, 31:], (1, 9), loaded.reorder([0, 1, 2]))
    assert relative(y[:, -1], model(x)) < 1e-13
    with pytest.raises(ValueError, match="a LayerState has future, inputs"):
        LayerState.from_state_dict(state.state_dict())
