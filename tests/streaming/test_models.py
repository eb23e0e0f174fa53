"""The streaming outputs of blocks and models equal those of the parallel form."""

import pytest
import torch

from mrconv import (
    Backbone,
    LanguageModel,
    MRConvBlock,
    SequenceClassifier,
    SequenceLabeller,
    SequenceRegressor,
    reparameterize,
)

from ..conftest import randomise, relative
from .helpers import double, streamed

SIZES = [(1,), (1, 3, 7, 90)]
SMALL = {"d_model": 8, "depth": 3, "l_max": 40, "kernel": "fourier+sparse", "kernel_size": 4, "dtype": torch.float64}
TOKENS = SMALL | {"vocab_size": 11}


def tokens(batch=3, length=130):
    return torch.randint(11, (batch, length))


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("block_norm", ["batch", "layer"])
@pytest.mark.parametrize("kind", ["dense", "dilated", "fourier"])
def test_blocks_stream(prenorm, block_norm, kind):
    options = {"prenorm": prenorm, "block_norm": block_norm, "kernel": kind, "heads": 2, "dropout": 0.3}
    block = randomise(MRConvBlock(8, 40, dtype=torch.float64, **options)).eval()
    u = double(2, 400, 8)
    for sizes in SIZES:
        assert relative(streamed(block, u, sizes)[0], block(u)) < 1e-12


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("prenorm", [False, True])
def test_models_with_an_output_per_position_stream(merged, sizes, prenorm):
    for model_class, options in (
        (Backbone, {}),
        (LanguageModel, {}),
        (SequenceLabeller, {"n_classes": 5}),
        (SequenceRegressor, {"per_position": True}),
    ):
        model = randomise(model_class(**(TOKENS | {"prenorm": prenorm} | options))).eval()
        if merged:
            reparameterize(model)
        x = tokens()
        assert relative(streamed(model, x, sizes)[0], model(x)) < 1e-11


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_classifier_predicts_from_the_sequence_so_far(pool, sizes):
    options = SMALL | {"d_input": 2, "pool": pool}
    for model in (SequenceClassifier(n_classes=5, **options), SequenceRegressor(**options)):
        model, x = randomise(model).eval(), double(2, 130, 2)
        y, _ = streamed(model, x, sizes)
        for length in (1, 17, 100, 130):
            assert relative(y[:, length - 1], model(x[:, :length])) < 1e-11


def test_a_reset_classifier_pools_from_the_beginning():
    model = randomise(SequenceClassifier(n_classes=5, **TOKENS)).eval()
    x, later = tokens(), tokens(length=20)
    state = streamed(model, x, (130,))[1].reset([1])
    y, _ = streamed(model, later, (1,), state)
    assert relative(y[1:2, -1], model(later[1:2])) < 1e-11
    assert relative(y[::2, -1], model(torch.cat([x, later], 1))[::2]) < 1e-11


def test_a_language_model_generates_what_the_parallel_form_would():
    model = randomise(LanguageModel(**TOKENS)).eval()
    prompt = tokens(2, 19)
    logits, state = model.prefill(prompt)
    written, logits = prompt, logits[:, -1]
    for _ in range(60):
        token = logits.argmax(-1)
        written = torch.cat([written, token[:, None]], 1)
        logits, state = model.step(token, state)
    assert torch.equal(model(written)[:, 18:-1].argmax(-1), written[:, 19:])


def test_a_model_streams_at_another_rate():
    model, x = randomise(Backbone(**(SMALL | {"kernel": "fourier"}))).eval(), double(2, 130, 8)
    y, state = model.prefill(x[:, :70], rate=0.5)
    rest, _ = streamed(model, x[:, 70:], (1,), state)
    assert relative(torch.cat([y, rest], 1), model(x, rate=0.5)) < 1e-12


def test_models_in_training_mode_or_bidirectional_cannot_stream():
    for block_norm in ("batch", "layer"):
        model = Backbone(**TOKENS, block_norm=block_norm)
        with pytest.raises(ValueError, match="training mode"):
            model.initial_state(2)
        state = model.eval().initial_state(3)
        with pytest.raises(ValueError, match="training mode"):
            model.train().step(tokens()[:, 0], state)
    with pytest.raises(ValueError, match="bidirectional"):
        SequenceClassifier(**TOKENS, n_classes=2, bidirectional=True).eval().initial_state(1)
    with pytest.raises(ValueError, match="tokens must be integers"):
        model.eval().step(double(3), state)
