"""Mixers other than MRConv stream as it does, or raise an error that says why not."""

import pytest
import torch

from mrconv import LanguageModel, MRConvBlock, SequenceClassifier, reparameterize
from mrconv.baselines import mixer_names
from mrconv.streaming.state import BackboneState, MixerState

from ..conftest import randomise, relative
from .helpers import double, greedy_continuation, streamed

OPTIONS = {
    "s4": {"d_state": 6},
    "s4d": {"d_state": 6},
    "s5": {"d_state": 6},
    "liquid-s4": {"d_state": 6, "degree": 3},
    "mamba": {"d_state": 3},
    "attention": {"n_heads": 2},
    "mega": {"d_ema": 3, "d_attention": 4},
    "mega-chunk": {"d_ema": 3, "d_attention": 4, "chunk": 9},
    "mrhyena": {"kernel_size": 4},
    "mrconv-attention": {"kernel": "dilated", "kernel_size": 4, "d_attention": 4, "chunk": 7},
}
VARIANTS = {name: (name, {}) for name in OPTIONS} | {
    "learned": ("attention", {"positions": "learned", "l_max": 200}),
    "laplace": ("mega", {"attention": "laplace"}),
    "laplace in chunks": ("mega-chunk", {"attention": "laplace", "chunk": 5}),
    "one tap": ("mrhyena", {"d_conv": 1}),
    "no chunks": ("mrconv-attention", {"chunk": None}),
}
MIXERS = ("mrconv", *OPTIONS)


def build(variant, l_max=40):
    name, more = VARIANTS[variant]
    options = OPTIONS[name] | more
    l_max = options.pop("l_max", l_max)
    return randomise(MRConvBlock(4, l_max, mixer=name, mixer_options=options, dtype=torch.float64)).layer.eval()


@pytest.mark.parametrize("sizes", [(1,), (1, 3, 7, 50)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_and_chunks_equal_the_parallel_output(variant, sizes):
    mixer, u = build(variant), double(2, 131, 4)
    with torch.no_grad():
        assert relative(streamed(mixer, u, sizes)[0], mixer(u)) < 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_reset_sequences_restart_and_others_continue(variant):
    mixer, u, later = build(variant), double(3, 33, 4), double(3, 40, 4)
    u[1] = torch.nan
    state = streamed(mixer, u, (33,))[1].reset([1])
    y, _ = streamed(mixer, later, (1, 6), state)
    with torch.no_grad():
        assert relative(y[1:2], mixer(later[1:2])) < 1e-11
        assert relative(y[::2], mixer(torch.cat([u, later], 1)[::2])[:, 33:]) < 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_can_be_copied_reordered_and_saved(variant, tmp_path):
    mixer, u, later = build(variant), double(2, 30, 4), double(3, 25, 4)
    _, state = mixer.prefill(u)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    streamed(mixer, later[:2], (5,), state.copy())
    loaded = MixerState.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(loaded.tensors(), state.tensors(), strict=True))
    assert not any(x.is_complex() for x in loaded.tensors())
    y, _ = streamed(mixer, later, (1,), loaded.reorder([1, 0, 1]))
    with torch.no_grad():
        assert relative(y, mixer(torch.cat([u[[1, 0, 1]], later], 1))[:, 30:]) < 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_from_inference_mode_continues_outside_of_it(variant):
    mixer, u = build(variant), double(2, 40, 4)
    with torch.inference_mode():
        _, state = streamed(mixer, u[:, :21], (20, 1))
    y, _ = streamed(mixer, u[:, 21:], (1, 5), state.copy())
    again, _ = streamed(mixer, u, (1, 5), state.reset([0, 1]))
    with torch.no_grad():
        assert relative(y, mixer(u)[:, 21:]) < 1e-11
        assert relative(again, mixer(u)) < 1e-11


@pytest.mark.parametrize("name", ["s4", "s4d", "s5", "liquid-s4", "attention"])
def test_continuous_mixers_stream_at_another_rate(name):
    mixer, u = build(name), double(2, 50, 4)
    y, state = mixer.prefill(u[:, :30], rate=0.5)
    rest, _ = streamed(mixer, u[:, 30:], (1,), state)
    with torch.no_grad():
        assert relative(torch.cat([y, rest], 1), mixer(u, rate=0.5)) < 1e-11


def test_changed_parameters_take_effect_at_once():
    mixer, u = build("s4d"), double(2, 9, 4)
    mixer.prefill(u)
    with torch.no_grad():
        mixer.log_dt += 1
        assert relative(mixer.prefill(u)[0], mixer(u)) < 1e-12


def test_the_cache_of_chunked_attention_is_bounded():
    mixer, u = build("mega-chunk"), double(1, 400, 4)
    assert streamed(mixer, u, (1,))[1].cache.keys.shape[1] <= 4 * 9


@pytest.mark.parametrize("name", MIXERS)
def test_generated_tokens_equal_those_of_the_parallel_form(name):
    options = {"mixer": name, "mixer_options": OPTIONS[name]} if name != "mrconv" else {"kernel_size": 4}
    model = LanguageModel(vocab_size=9, d_model=8, depth=2, l_max=40, dtype=torch.float64, **options)
    reparameterize(randomise(model).eval())
    tokens = torch.randint(9, (2, 11))
    continuation = model.generate(tokens, 40, temperature=0)
    assert torch.equal(continuation, greedy_continuation(model, tokens, 40))
    _, state = model.prefill(torch.cat([tokens, continuation], 1))
    loaded = BackboneState.from_state_dict(state.copy().state_dict())
    assert torch.equal(model.step(tokens[:, 0], state)[0], model.step(tokens[:, 0], loaded)[0])


def test_a_classifier_with_another_mixer_predicts_from_the_sequence_so_far():
    model = SequenceClassifier(n_classes=3, d_input=2, d_model=8, depth=2, l_max=40, mixer="mega").double().eval()
    u = double(2, 31, 2)
    with torch.no_grad():
        assert relative(streamed(model, u, (1, 4))[0][:, 20], model(u[:, :21])) < 1e-11


def test_mixers_and_states_that_cannot_stream_are_rejected():
    for name in set(mixer_names()) - set(MIXERS):
        with pytest.raises(ValueError, match="has no recurrent state and cannot stream"):
            MRConvBlock(4, 40, mixer=name).eval().initial_state(1)
    for name in set(MIXERS) - {"mamba"}:
        with pytest.raises(ValueError, match="bidirectional=True"):
            MRConvBlock(4, 40, mixer=name, bidirectional=True).eval().initial_state(1)
    with pytest.raises(ValueError, match="has the dtypes that its mixer computes in"):
        build("attention").initial_state(1, dtype=torch.float32)
    for variant in ("s4d", "attention", "mrhyena"):
        with pytest.raises(ValueError, match="the state holds 1 sequences on cpu; got an input of 3 on cpu"):
            build(variant).stream(double(3, 5, 4), build(variant).initial_state(1))
    with pytest.raises(ValueError, match="norm='batch' in training mode"):
        build("mrhyena").train().initial_state(1)
