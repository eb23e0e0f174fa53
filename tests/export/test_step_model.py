"""The step model gives the outputs of the parallel form, without modifying its inputs."""

import pytest
import torch

from mrconv import LanguageModel, MRConv, SequenceClassifier, SequenceLabeller, SequenceRegressor, TwoTowerClassifier
from mrconv.export.step_model import StepModel

from ..conftest import randomise, relative
from ..streaming.helpers import L_MAX, LAYERS


def stepped(model, x):
    """Return the step model's outputs for all positions of x, and its last state."""
    step, outputs = StepModel(model), []
    state = step.initial_state(len(x))
    for t in range(x.shape[1]):
        before = [s.clone() for s in state]
        y, *after = step(x[:, t], *state)
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))  # no tensor is modified in place
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
    after = StepModel(model).state_after(model, x)
    assert all(relative(a, b) < 1e-5 for a, b in zip(after, state, strict=True))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (TwoTowerClassifier, {}, "a TwoTowerClassifier needs whole sequences"),
        (SequenceClassifier, {"n_classes": 2, "bidirectional": True, "merged": True}, "bidirectional=True"),
        (SequenceClassifier, {"n_classes": 2, "mixer": "s4d"}, "needs mixer='mrconv'; got mixer='s4d'"),
    ],
)
def test_models_without_a_step_are_rejected(cls, options, message):
    model = cls(d_model=4, depth=1, l_max=8, vocab_size=5, **options).eval()
    with pytest.raises(ValueError, match=message):
        StepModel(model)
