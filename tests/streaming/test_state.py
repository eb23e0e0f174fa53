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
def test_reset_sequences_start_anew_and_others_go_on(name, merged, sizes):
    layer, u, later = build(name, merged), double(3, 77, 4), double(3, 150, 4)
    state = streamed(layer, u, (77,))[1].reset(torch.tensor([False, True, False]))
    y, _ = streamed(layer, later, sizes, state)
    assert relative(y[1:2], layer(later[1:2])) < 1e-13
    assert relative(y[::2], layer(torch.cat([u, later], 1))[::2, 77:]) < 1e-13


def test_reset_takes_masks_places_and_a_number():
    layer, u = build("fourier"), double(3, 20, 4)
    _, state = layer.prefill(u)
    for where in ([1], 1, torch.tensor([1]), torch.tensor([False, True, False])):
        found = state.copy().reset(where)
        assert all(x[1].abs().max() == 0 for x in found.tensors())
        assert all(torch.equal(x[::2], y[::2]) for x, y in zip(found.tensors(), state.tensors(), strict=True))


def test_no_sequences_are_some_of_them():
    layer, u = build("fourier"), double(3, 20, 4)
    _, state = layer.prefill(u)
    for none in ([], torch.tensor([], dtype=torch.long)):
        found = state.copy().reset(none)
        assert all(torch.equal(x, y) for x, y in zip(found.tensors(), state.tensors(), strict=True))
        assert {len(x) for x in state.reorder(none).tensors()} == {0}


def test_a_state_keeps_its_dtypes():
    state = build("fourier", dtype=torch.float32).initial_state(2)
    for asked in ((torch.float16,), ("cpu", torch.float16), (torch.zeros(1, dtype=torch.float16),)):
        with pytest.raises(ValueError, match=r"the dtype of a state; got torch.float16 for a tensor of torch.float32"):
            state.to(*asked)
    assert [x.dtype for x in state.to("cpu").tensors()] == [torch.float32, torch.float64]


def test_reset_forgets_even_what_is_not_a_number():
    for name in NAMES:
        layer, u = build(name), double(2, 60, 4)
        _, state = layer.prefill(u * torch.tensor([1.0, torch.nan])[:, None, None].double())
        y, _ = streamed(layer, u, (1, 31), state.reset([1]))
        assert relative(y[1:], layer(u[1:])) < 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_beams_go_their_own_ways(name):
    layer, u = build(name), double(2, 50, 4)
    _, state = layer.prefill(u)
    beams, later = [1, 0, 1], double(3, 70, 4)
    y, _ = streamed(layer, later, (1, 9), state.reorder(torch.tensor(beams)))
    assert relative(y, layer(torch.cat([u[beams], later], 1))[:, 50:]) < 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on_where_it_was(name, tmp_path):
    layer, u = build(name), double(2, 120, 4)
    _, state = layer.prefill(u[:, :71])
    torch.save(state.state_dict(), tmp_path / "state.pt")
    layer.stream(u[:, :9], state)  # the saved one has nothing to do with it
    loaded = LayerState.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    y, _ = streamed(layer, u[:, 71:], (1, 9), loaded)
    assert relative(y, layer(u)[:, 71:]) < 1e-13


def test_a_copy_is_independent_and_moves():
    layer, u = build("fourier+sparse"), double(2, 40, 4)
    _, state = layer.prefill(u)
    kept = state.copy()
    layer.step(u[:, 0], state)
    assert state.time == 41
    assert kept.time == 40
    assert not torch.equal(kept.modes, state.modes)
    assert {x.device.type for x in kept.to("meta").tensors()} == {"meta"}
    assert kept.nbytes == sum(x.numel() * 8 for x in (kept.inputs, kept.modes))
    assert all(not x.is_complex() and x.shape[0] == 2 for x in kept.tensors())


def test_nested_states_are_saved_too(tmp_path):
    model = SequenceClassifier(d_model=4, depth=2, l_max=30, d_input=2, n_classes=3, kernel_size=4, dtype=torch.float64)
    model, x = randomise(model).eval(), double(3, 60, 2)
    _, state = model.prefill(x[:, :31])
    torch.save(state.state_dict(), tmp_path / "state.pt")
    loaded = PooledState.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    y, _ = streamed(model, x[:, 31:], (1, 9), loaded.reorder([0, 1, 2]))
    assert relative(y[:, -1], model(x)) < 1e-13
    with pytest.raises(ValueError, match="a LayerState has future, inputs"):
        LayerState.from_state_dict(state.state_dict())
