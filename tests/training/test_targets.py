"""Targets of custom data: the model, the loss and the score of each, and what its recorded model predicts."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mrconv
from mrconv import SequenceClassifier, SequenceLabeller, SequenceRegressor
from mrconv.cli import main
from mrconv.tasks import Prepared, Split
from mrconv.tasks.packing import random_split
from mrconv.tasks.window_loader import IGNORED
from mrconv.training import loop
from mrconv.training.composition import compose
from mrconv.training.evaluation import evaluate
from mrconv.training.scores import SCORES
from mrconv.training.targets import TARGETS

from .miniature import small, train_without_figures

pytestmark = pytest.mark.usefixtures("without_figures")

LENGTH = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, LENGTH)).astype(np.float32)
MEANS = X.mean(1)
Y = {
    "class": (MEANS > 0).astype(int),
    "labels": np.stack([MEANS > 0, X[:, 0] > 0, X[:, 1] > 1], 1).astype(int),
    "values": np.stack([1000 + 500 * MEANS, 0.01 * X[:, 0]], 1),
    "positions": np.where(X > 1.5, -1, X > 0),
}
MODELS = {"labels": SequenceClassifier, "values": SequenceRegressor, "positions": SequenceLabeller}


def experiment(folder, target, **changes):
    """Return a small experiment on arrays in a folder."""
    if not (folder / "data.npz").exists():
        np.savez(folder / "data.npz", x=X, y=Y[target])
    settings = ["task=folder", f"data={folder / 'data.npz'}", f"target={target}", f"data_dir={folder}"]
    return small(compose(settings), **({"epochs": 2, "limit_train": 4, "lr": 0.01} | changes))


@pytest.fixture(scope="module", params=list(MODELS))
def run(request, tmp_path_factory):
    """Return target, folder and result of a run."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder / "run", train_without_figures(experiment(folder, request.param), folder / "run")


def test_recorded_scores_are_those_of_the_predictions(run, capsys):
    target, folder, result = run
    predictor = mrconv.load(folder)
    assert (type(predictor.model), predictor.target) == (MODELS[target], target)
    test = _test_examples(result)
    predictions = [predictor.predict(X[i]) for i in test]
    y = Y[target][test]
    if target == "labels":
        found = np.array([[p.probabilities[name] > 0.5 for name in "012"] for p in predictions])
        assert [p.label for p in predictions] == [";".join(np.array(list("012"))[row]) for row in found]
        score = (found == y).mean()
    elif target == "values":
        score = np.abs([[*p.values.values()] for p in predictions] - y).mean()
    else:
        found = np.array([[int(name) for name in p.positions] for p in predictions])
        score = (found == y)[y >= 0].mean()
    assert result["metric"] == {"values": "mae"}.get(target, "accuracy")
    assert result[result["metric"]]["test"] == pytest.approx(score, rel=1e-4)
    assert evaluate(folder)["test"] == pytest.approx(score, rel=1e-4)
    assert main(["evaluate", str(folder)]) in (0, None)
    printed = capsys.readouterr().out
    assert (f"{score:.4g}" if target == "values" else f"{score:.2%}") in printed


def _test_examples(result):
    assert result["examples"] == {"train": 32, "val": 4, "test": 4}
    return random_split(40, (0, 0.1, 0.1), 42)[2]


def test_predict_writes_the_outputs_of_the_target(run, tmp_path, capsys):
    target, folder, _ = run
    np.savez(tmp_path / "some.npz", x=X[:2], y=Y[target][:2])
    main(["predict", str(folder), str(tmp_path / "some.npz"), "--json"])
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    field, keys = {
        "labels": ("probabilities", ["0", "1", "2"]),
        "values": ("values", ["y_0", "y_1"]),
        "positions": ("positions", None),
    }[target]
    assert set(first) == {"input", "target", "label", field, "notes"}
    assert list(first[field]) == keys if keys else len(first[field]) == LENGTH
    main(["predict", str(folder), str(tmp_path / "some.npz"), "--out", str(tmp_path / "out.csv")])
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    columns = {"labels": "p(0),p(1),p(2),", "values": "y_0,y_1,", "positions": ""}[target]
    assert header == f"input,target,prediction,{columns}notes"
    main(["predict", str(folder), str(tmp_path / "some.npz")])
    assert {"labels": "%", "values": "y_0  ", "positions": first["label"]}[target] in capsys.readouterr().out


def test_streams_end_in_the_prediction_of_the_whole(run):
    target, folder, _ = run
    predictor = mrconv.load(folder)
    stream, whole = predictor.stream(), predictor.predict(X[0])
    stream.feed(X[0, :5])
    latest = stream.feed(X[0, 5:])
    if target == "positions":
        assert latest.label == whole.positions[-1]
        assert stream.end().label == latest.label
    elif target == "values":
        assert list(stream.end().values.values()) == pytest.approx(list(whole.values.values()), rel=1e-3)
    else:
        assert stream.end().probabilities == pytest.approx(whole.probabilities, rel=1e-3)


def test_values_are_standardised_in_training_and_predicted_in_their_units(tmp_path):
    loop.train(experiment(tmp_path, "values"), tmp_path / "run", quiet=True)
    losses = (tmp_path / "run" / "metrics.csv").read_text()
    header, *lines = (line.split(",") for line in losses.splitlines())
    assert float(lines[0][header.index("train/loss")]) < 10  # of the raw values: 10**6
    assert float(lines[-1][header.index("val/mae")]) < 1000  # in units, of which one value has 10**3
    saved = mrconv.load(tmp_path / "run", merged=False).model
    assert saved.head.bias[0] > 500  # the mean is in the head


def test_a_target_needs_custom_data(tmp_path):
    with pytest.raises(ValueError, match="target=values is for custom data; set task=folder too"):
        loop.train(compose(["task=listops", "target=values"]), tmp_path / "run")
    with pytest.raises(ValueError, match="target must be one of class, labels, values, positions; got 'regression'"):
        compose(["task=folder", "target=regression"])
    with pytest.raises(ValueError, match="label_smoothing is for classes"):
        compose(["task=folder", "target=values", "label_smoothing=0.1"])


def data_of(target, y):
    return Prepared("folder", "values", ("a", "b"), 3, {"train": Split("train", X[: len(y), :3], y)}, target=target)


def test_losses_and_scores_by_target():
    torch.manual_seed(0)
    logits = torch.randn(4, 2)
    y = torch.tensor([[1.0, 0], [0, 0], [1, 1], [0, 1]])
    labels = TARGETS["labels"](data_of("labels", y.numpy()))
    torch.testing.assert_close(labels.loss(logits, y), F.binary_cross_entropy_with_logits(logits, y))
    correct, count = SCORES["accuracy"].sums(logits, y, logits.mean())
    assert (int(correct), int(count)) == (int(((logits > 0) == y.bool()).sum()), 8)
    values = TARGETS["values"](data_of("values", 100 + 10 * y.numpy()))
    torch.testing.assert_close(values.loss(values.in_units(logits), values.in_units(y)), (logits - y).square().mean())
    y = torch.tensor([[0, 1, IGNORED], [1, IGNORED, IGNORED]])
    logits = torch.randn(2, 3, 2)
    positions = TARGETS["positions"](data_of("positions", y.numpy()))
    torch.testing.assert_close(positions.loss(logits, y), F.cross_entropy(logits[y >= 0], y[y >= 0]))
    correct, count = SCORES["accuracy"].sums(logits, y, logits.mean())
    assert (int(correct), int(count)) == (int((logits.argmax(-1) == y)[y >= 0].sum()), 3)
