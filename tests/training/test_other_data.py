"""Scores of a run on other custom data: every example, with the model's symbols and classes."""

import csv

import numpy as np
import pytest

import mrconv
from mrconv.tasks import Prepared, Split
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.training.composition import compose
from mrconv.training.evaluation import measure_run
from mrconv.training.other_data import as_trained

from .miniature import small, train_without_figures


def write_texts(path, labels, letters):
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label"])
        for i in range(30):
            label = labels[i % len(labels)]
            table.writerow(["".join(rng.choice(list(letters), 8)) + label, label])
    return path


def test_other_texts_are_scored_as_they_are_predicted(tmp_path):
    path = write_texts(tmp_path / "all.csv", "xyz", "abcd")
    settings = ["task=folder", f"data={path}", f"data_dir={tmp_path}", "task.stratify=true"]
    train_without_figures(small(compose(settings), lr=0.1), tmp_path / "run")
    other = write_texts(tmp_path / "other.csv", "zx", "bcdeü")
    measured, predictor = measure_run(tmp_path / "run", [f"data={other}"]), mrconv.load(tmp_path / "run")
    assert {split: values["examples"] for split, values in measured.metrics.items()} == {"all": 30}
    predicted = list(predictor.predict_each(predictor.read(other)))
    for line, (each, prediction) in zip(measured.lines, predicted, strict=True):
        assert (line["target"], line["prediction"]) == (each.label, prediction.label)
        assert float(line["p(y)"]) == pytest.approx(prediction.probabilities["y"], rel=1e-3)
    halves = measure_run(tmp_path / "run", [f"data={other}", "task.test_fraction=0.5"]).metrics
    assert {split: values["examples"] for split, values in halves.items()} == {"test": 16}
    one = write_texts(tmp_path / "one.csv", "y", "ab")  # a class alone
    assert measure_run(tmp_path / "run", [f"data={one}"]).metrics["all"]["examples"] == 30
    with pytest.raises(ValueError, match=r"classes of the data: w, x; of the model in .*run: x, y, z"):
        measure_run(tmp_path / "run", [f"data={write_texts(tmp_path / 'w.csv', 'wx', 'ab')}"])


def test_some_of_the_labels_of_a_model_keep_their_columns():
    def data(classes, y, target):
        return Prepared("mine", "values", classes, 4, {"test": Split("test", np.ones((2, 4, 1)), y)}, target=target)

    trained = Preprocessor("values", 4, ("a", "b", "c"), target="labels")
    given = data(("c", "a"), np.array([[1, 0], [1, 1]]), "labels")
    assert as_trained(given, trained, "m").splits["test"].y.tolist() == [[0, 0, 1], [1, 0, 1]]
    trained = Preprocessor("values", 4, ("a", "b", "c"), target="positions")
    given = data(("b", "c"), np.array([[0, 1, -100, 0], [-100, 0, 0, 1]]), "positions")
    assert as_trained(given, trained, "m").splits["test"].y.tolist() == [[1, 2, -100, 1], [-100, 1, 1, 2]]
