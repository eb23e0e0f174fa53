"""Metrics by target, the files that evaluate writes, and the monitored metric."""

import csv
import json
import math

import numpy as np
import pytest
import torch

from mrconv.cli import main
from mrconv.tasks import Prepared, Split
from mrconv.tasks.window_loader import IGNORED
from mrconv.training import loop
from mrconv.training.checkpoints import Checkpoints
from mrconv.training.datamodule import TaskData
from mrconv.training.metrics import Metrics, monitorable

from .miniature import data as miniature
from .miniature import listops, small
from .test_targets import Y, experiment

pytestmark = pytest.mark.usefixtures("without_figures")


def measured(target, classes, *batches):
    """Return the metrics of batches of outputs and labels."""
    empty = {"train": Split("train", np.zeros(0), np.zeros(0))}
    metric = "mae" if target == "values" else "accuracy"
    metrics = Metrics(Prepared("folder", "values", tuple(classes), 3, empty, target=target, metric=metric))
    for outputs, y in batches:
        metrics.update(outputs, y, torch.tensor(0.5))
    return metrics.compute()


def test_metrics_of_classes():
    y = torch.tensor([0, 0, 0, 1, 1])
    found = torch.tensor([0, 0, 1, 1, 2])
    logits = 5 * torch.nn.functional.one_hot(found, 3).float()
    values = measured("class", "abc", (logits[:2], y[:2]), (logits[2:], y[2:]))
    assert (values["loss"], values["accuracy"]) == (0.5, 0.6)
    assert values["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)  # c does not occur
    assert values["confusion_matrix"] == [[2, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert values["f1_per_class"] == pytest.approx({"a": 0.8, "b": 0.5, "c": 0})
    assert values["f1"] == pytest.approx((0.8 + 0.5 + 0) / 3)
    ranks = [(1 + 1 + 1 + 1 + 0.5 + 0.5) / 6, (1 + 1 + 0.5 + 0.5 + 0.5 + 0) / 6]
    assert values["auroc"] == pytest.approx(np.mean(ranks))


def test_metrics_are_undefined_where_they_have_no_example():
    values = measured("class", "ab", (torch.randn(3, 2), torch.zeros(3, dtype=torch.long)))
    assert values["auroc"] is None
    values = measured("values", ["z"], (torch.zeros(1, 1), torch.ones(1, 1)))
    assert (values["r2"], values["mae"], values["r2_per_value"]) == (None, 1.0, {"z": None})
    json.dumps(values, allow_nan=False)


def test_metrics_of_labels_and_of_positions():
    y = torch.tensor([[1.0, 0], [1, 1], [0, 0]])
    values = measured("labels", "ab", (torch.tensor([[2.0, -1], [1, -2], [-1, -3]]), y))
    assert (values["accuracy"], values["exact_match"]) == pytest.approx((5 / 6, 2 / 3))
    assert values["f1_per_class"] == {"a": 1.0, "b": 0.0}
    assert values["confusion_matrix"] == [[[1, 0], [0, 2]], [[2, 0], [1, 0]]]
    assert values["auroc"] == pytest.approx((1 + 0.5) / 2)
    y = torch.tensor([[0, 1, IGNORED], [1, IGNORED, IGNORED]])
    values = measured("positions", "ab", (torch.tensor([[[1.0, 0], [1, 0], [0, 9]], [[0, 1], [9, 0], [9, 0]]]), y))
    assert values["confusion_matrix"] == [[1, 0], [1, 1]]
    assert (values["accuracy"], values["balanced_accuracy"]) == pytest.approx((2 / 3, 3 / 4))


def test_metrics_of_values():
    outputs, y = torch.tensor([[1.0, 0], [2, 0], [3, 3]]), torch.tensor([[1.0, 0], [2, 2], [3, 4]])
    values = measured("values", ["u", "v"], (outputs[:1], y[:1]), (outputs[1:], y[1:]))
    assert (values["mae"], values["rmse"]) == pytest.approx((0.5, math.sqrt(5 / 6)))
    assert values["r2_per_value"] == pytest.approx({"u": 1, "v": 1 - 5 / 8})
    assert values["r2"] == pytest.approx((1 + 3 / 8) / 2)
    assert values["mae_per_value"] == pytest.approx({"u": 0, "v": 1})


def table(path):
    """Return the lines of a CSV file."""
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("target", list(Y))
def test_evaluate_writes_metrics_and_predictions(tmp_path, target, capsys):
    loop.train(experiment(tmp_path, target, epochs=1), tmp_path / "run", quiet=True)
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (written["target"], written["merged"], list(written["splits"])) == (target, True, ["val", "test"])
    lines = table(tmp_path / "out" / "predictions.csv")
    assert [line["split"] for line in lines] == ["val"] * 4 + ["test"] * 4
    test = written["splits"]["test"]
    numbers = [int(line["example"].removeprefix("example ")) - 1 for line in lines[4:]]  # as in the file
    assert numbers == sorted(numbers)
    y = Y[target][numbers]
    if target == "values":
        found = np.array([[float(line[name]) for name in ("y_0", "y_1")] for line in lines[4:]])
        assert test["mae"] == pytest.approx(np.abs(found - y).mean(), rel=1e-4)
    elif target == "class":
        assert [line["target"] for line in lines[4:]] == [str(label) for label in y]
        assert test["accuracy"] == np.mean([line["target"] == line["prediction"] for line in lines[4:]])
        assert (tmp_path / "out" / "figures" / "confusion.png").stat().st_size > 0
    elif target == "labels":
        assert test["exact_match"] == np.mean([line["target"] == line["prediction"] for line in lines[4:]])
    else:
        pairs = [(line["target"].split(), line["prediction"].split()) for line in lines[4:]]
        assert [len(t) for t, _ in pairs] == [len(p) for _, p in pairs] == (y >= 0).sum(1).tolist()
    printed = capsys.readouterr().out
    assert all(name.replace("_", " ") in printed.splitlines()[0] for name in test if isinstance(test[name], float))
    assert f"in {tmp_path / 'out'}: metrics.json, predictions.csv" in printed


def test_an_evaluation_with_other_settings_has_its_own_folder(tmp_path, capsys):
    loop.train(experiment(tmp_path, "class", epochs=1), run := tmp_path / "run", quiet=True)
    assert main(["evaluate", str(run), "batch_size=3", f"data_dir={tmp_path}", "--device", "cpu"]) == 0
    whole = (run / "metrics.json").read_text()
    for settings in (["limit_eval=1"], ["batch_size=1", "limit_eval=1"]):
        assert main(["evaluate", str(run), *settings, "--device", "cpu"]) == 0
        folder = run / "-".join(["evaluate", *settings]).replace("=", "")
        assert f"in {folder}: metrics.json" in capsys.readouterr().out
        assert json.loads((folder / "metrics.json").read_text())["changes"]["limit_eval"] == 1
        assert (folder / "predictions.csv").exists()
    assert main(["evaluate", str(run), "--branches", "--device", "cpu"]) == 0
    branches = json.loads((run / "evaluate-branches-true" / "metrics.json").read_text())
    assert (branches["changes"], branches["merged"]) == ({"branches": True}, False)
    assert (run / "metrics.json").read_text() == whole
    assert json.loads(whole)["changes"] == {}


def test_a_run_monitors_any_metric(tmp_path):
    result = loop.train(experiment(tmp_path, "class", monitor="f1", epochs=3), tmp_path / "run", quiet=True)
    lines = table(tmp_path / "run" / "metrics.csv")
    scores = [float(line["val/f1"]) for line in lines]
    assert len(scores) == 3
    assert scores[result["best_epoch"] - 1] == max(scores)
    assert (result["watched"], result["metric"]) == ("val/f1", "accuracy")  # codespell:ignore watched
    written = json.loads(_evaluated(tmp_path).read_text())["splits"]["val"]
    assert written["f1"] == pytest.approx(max(scores), abs=1e-6)


def _evaluated(folder):
    main(["evaluate", str(folder / "run"), "--device", "cpu"])
    return folder / "run" / "metrics.json"


@pytest.mark.parametrize(("monitor", "best"), [("accuracy", 1), ("loss", 2), ("f1", 0)])
def test_the_monitored_metric_chooses_the_epoch(tmp_path, monitor, best):
    task = miniature("image")
    checkpoints = Checkpoints(tmp_path, TaskData(small(listops(), monitor=monitor), task), 0)
    epochs = [(0.5, 0.9, 0.7), (0.8, 0.8, 0.4), (0.6, 0.1, 0.6)]
    checkpoints.history = [
        dict(zip(("val/accuracy", "val/loss", "val/f1"), epoch, strict=True)) | {"epoch": i}
        for i, epoch in enumerate(epochs)
    ]
    assert checkpoints.best_scores()["epoch"] == best


def test_an_unknown_metric_is_named():
    task = miniature("image")
    assert monitorable(task) == ["loss", "accuracy", "balanced_accuracy", "f1", "auroc"]
    assert monitorable(miniature("characters")) == ["loss", "bits"]
    with pytest.raises(ValueError, match=r"monitor must be one of loss, accuracy, .*; got 'r2'"):
        TaskData(small(listops(), monitor="r2"), task)
