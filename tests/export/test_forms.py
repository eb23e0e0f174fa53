"""The convolutions as exporters see them, and the step, against the library's own; nothing is exported here."""

import pytest
import torch

from mrconv import LanguageModel, MRConv, SequenceClassifier, SequenceLabeller, SequenceRegressor, TwoTowerClassifier
from mrconv.export import plain_ops as forms
from mrconv.export.step_model import Step
from mrconv.ops import conv_reference

from ..conftest import randomise, relative
from ..streaming.helpers import L_MAX, LAYERS

LAGS = {
    "plain": range(9),
    "plain, both ways": range(-4, 5),
    "spectral": range(300),
    "spectral, both ways": range(-300, 300),
    "longer than the input": range(-2000, 3000),
    "one": range(1),
    "few taps nearby": (0, 3, 17),
    "shifts": (-290, -2, 0, 5, 400),
    "ahead only": (-300, -7),
    "far only": (270, 300),
    "many taps": (*range(0, 500, 3), 700),
}


@pytest.mark.parametrize("name", LAGS)
@pytest.mark.parametrize("length", [1, 63, 290])
@pytest.mark.parametrize("products", [False, True])
def test_every_form_is_the_convolution(name, length, products):
    lags = LAGS[name]
    u = torch.randn(2, 3, length, dtype=torch.float64)
    values, bias = torch.randn(3, len(lags), dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    for given, gelu in ((bias, True), (None, False)):
        y = forms.convolve(u, values, lags, given, gelu, longest=290, products=products)
        assert relative(y, conv_reference(u, values, lags, given, gelu)) < 1e-12


def test_the_cases_meet_every_form(monkeypatch):
    met, plain = [], torch.nn.functional.conv1d
    monkeypatch.setattr(forms.F, "conv1d", lambda *a, **k: met.append("plain") or plain(*a, **k))
    spectral = forms._spectral
    monkeypatch.setattr(forms, "_spectral", lambda *a: met.append("spectral") or spectral(*a))
    u = torch.randn(1, 1, 290)
    for lags in LAGS.values():
        before = len(met)
        forms.convolve(u, torch.randn(1, len(lags)), lags, None, False, 290, False)
        met += [] if len(met) > before else ["shifts"]
    assert met == ["plain"] * 2 + ["spectral"] * 3 + ["plain"] * 2 + ["shifts"] * 3 + ["spectral"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    u, values = torch.randn(2, 3, 400), torch.randn(3, 300) / 17
    y = forms.convolve(u.to(dtype), values.to(dtype), range(300), None, False, 400, True)
    assert y.dtype == dtype
    expected = conv_reference(u.to(dtype).float(), values.to(dtype).float(), range(300))
    assert torch.equal(y, expected.to(dtype)) or relative(y.float(), expected) < torch.finfo(dtype).eps


def stepped(model, x):
    """Return the outputs of a model's step for all positions."""
    step, outputs = Step(model), []
    state = step.initial_state(len(x))
    for t in range(x.shape[1]):
        before = [s.clone() for s in state]
        y, *after = step(x[:, t], *state)
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))  # nothing is written to
        state = after
        outputs.append(y)
    return torch.stack(outputs, 1), state


MODELS = {
    "labeller": (SequenceLabeller, {"n_classes": 3, "d_input": 2}),
    "regressor": (SequenceRegressor, {"n_outputs": 2, "per_position": True, "d_input": 2, "block_norm": "layer"}),
    "language model": (LanguageModel, {"vocab_size": 5}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_steps_equal_the_parallel_form_for_every_kernel(name):
    options = {"d_model": 12, "depth": 2, "l_max": L_MAX, "n_classes": 3, "d_input": 2, "dtype": torch.float64}
    model = randomise(SequenceLabeller(**(options | LAYERS[name]))).eval()
    x = torch.randn(2, 2 * L_MAX + 30, 2, dtype=torch.float64)
    expected = model(x)
    for layer in [m for m in model.modules() if isinstance(m, MRConv)]:
        layer.reparameterize()
    assert relative(stepped(model, x)[0], expected) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_parallel_form_for_every_model(name):
    cls, options = MODELS[name]
    model = randomise(cls(d_model=8, depth=2, l_max=20, kernel_size=2, merged=True, dtype=torch.float64, **options))
    x = torch.randint(5, (2, 50)) if "vocab_size" in options else torch.randn(2, 50, 2, dtype=torch.float64)
    assert relative(stepped(model.eval(), x)[0], model(x)) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_classifiers_step_gives_the_prediction_so_far(pool):
    model = randomise(
        SequenceClassifier(d_model=8, depth=2, l_max=20, n_classes=3, vocab_size=5, pool=pool, merged=True)
    ).eval()
    x = torch.randint(5, (2, 33))
    outputs, state = stepped(model, x)
    for t in (0, 7, 32):
        assert relative(outputs[:, t], model(x[:, : t + 1])) < 1e-5
    after = Step(model).state_after(model, x)
    assert all(relative(a, b) < 1e-5 for a, b in zip(after, state, strict=True))


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (TwoTowerClassifier, {}, "a TwoTowerClassifier needs whole sequences"),
        (SequenceClassifier, {"n_classes": 2, "bidirectional": True, "merged": True}, "bidirectional=True"),
        (SequenceClassifier, {"n_classes": 2, "mixer": "s4d"}, "mixer='s4d' has no such form"),
    ],
)
def test_models_without_a_step_are_refused(cls, options, says):
    model = cls(d_model=4, depth=1, l_max=8, vocab_size=5, **options).eval()
    with pytest.raises(ValueError, match=says):
        Step(model)
