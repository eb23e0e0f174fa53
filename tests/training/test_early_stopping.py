"""Early stopping, which follows from the recorded history, and class weights."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mrconv.cli.train import print_result
from mrconv.training import loop
from mrconv.training.checkpoints import Checkpoints
from mrconv.training.composition import compose
from mrconv.training.datamodule import TaskData
from mrconv.training.targets import TARGETS, weights_of_classes

from .miniature import data as miniature
from .miniature import listops, small, stopping_trainer
from .test_metrics import table
from .test_targets import data_of, experiment


@pytest.mark.parametrize(
    ("accuracies", "losses", "stops"),
    [
        ([0.5, 0.6, 0.7], [1, 1, 1], False),
        ([0.5, 0.6, 0.6], [1, 1, 1], False),
        ([0.6, 0.6, 0.5], [1, 1, 1], True),
        ([0.6, 0.6, 0.6], [1, 0.9, 0.9], False),  # of equal scores the smaller loss is better
        ([0.6, 0.5, 0.7, 0.6, 0.7], [1] * 5, True),
        ([0.6, 0.5], [math.nan] * 2, True),
        ([0.6], [1], False),
        ([], [], False),
    ],
)
def test_a_run_stops_after_epochs_without_a_better_score(tmp_path, accuracies, losses, stops):
    for patience, expected in ((2, stops), (0, False)):
        checkpoints = Checkpoints(tmp_path, TaskData(small(listops(), patience=patience), miniature("image")), 0)
        checkpoints.history = [
            {"epoch": i + 1, "val/accuracy": score, "val/loss": loss}
            for i, (score, loss) in enumerate(zip(accuracies, losses, strict=True))
        ]
        assert checkpoints.stops_early is expected


@pytest.fixture
def only_the_first_epoch_is_good(monkeypatch):
    monkeypatch.setattr(Checkpoints, "is_better", lambda self, new, best: best is None)


def test_an_early_stop_is_recorded_and_final(tmp_path, only_the_first_epoch_is_good, capsys):
    stopped = experiment(tmp_path, "class", epochs=9, patience=2, limit_train=1)
    result = loop.train(stopped, tmp_path / "run", quiet=True)
    assert (result["epochs_done"], result["best_epoch"]) == (3, 1)
    assert (result["partial"], result["stopped_early"]) == (False, True)
    assert loop.train(stopped, tmp_path / "run", quiet=True) == result
    print_result(result, tmp_path / "run")
    assert "best epoch 1, stopped early after 3 of 9 epochs" in capsys.readouterr().out
    complete = loop.train(experiment(tmp_path, "class", epochs=2, limit_train=1), tmp_path / "all", quiet=True)
    assert (complete["epochs_done"], "stopped_early" in complete) == (2, False)
    at_the_end = experiment(tmp_path, "class", epochs=2, patience=1, limit_train=1)
    assert "stopped_early" not in loop.train(at_the_end, tmp_path / "end", quiet=True)


@pytest.mark.parametrize("killed", ["in the second epoch", "before the result"])
def test_a_killed_run_stops_at_the_same_epoch(tmp_path, monkeypatch, only_the_first_epoch_is_good, killed):
    stopped = experiment(tmp_path, "class", epochs=9, patience=2, limit_train=2)
    loop.train(stopped, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patched:
        if killed == "before the result":
            patched.setattr(loop, "_record", lambda *_: exit(1))
        else:
            patched.setattr(loop, "make_trainer", stopping_trainer(3))
        with pytest.raises(SystemExit):
            loop.train(stopped, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "result.json").exists()
    assert loop.train(stopped, tmp_path / "run", quiet=True)["epochs_done"] == 3
    assert table(tmp_path / "run" / "metrics.csv") == table(tmp_path / "whole" / "metrics.csv")


def test_patience_needs_a_validation_split():
    with pytest.raises(ValueError, match="patience=3 needs a validation split; text has train and test"):
        TaskData(small(listops(), patience=3), miniature("text"))


def test_weights_of_classes_balance_their_frequency():
    y = np.array([0, 0, 0, 1])
    assert weights_of_classes(data_of("class", y), "balanced").tolist() == pytest.approx([4 / 6, 2])
    positions = np.array([[0, 0, 0], [0, 1, -100]])
    assert weights_of_classes(data_of("positions", positions), "balanced").tolist() == pytest.approx([5 / 8, 5 / 2])
    labels = np.array([[1, 0], [1, 0], [1, 1], [0, 0]], np.float32)
    assert weights_of_classes(data_of("labels", labels), "balanced").tolist() == pytest.approx([1 / 3, 3])
    assert weights_of_classes(data_of("class", y), "none") is None
    with pytest.raises(ValueError, match="class_weights has 3 numbers; folder has the classes a, b"):
        weights_of_classes(data_of("class", y), [1, 2, 3])
    with pytest.raises(ValueError, match="class_weights=balanced is for classes; folder has none"):
        weights_of_classes(data_of("values", labels), "balanced")
    for wrong in ("class_weights=equal", "class_weights=[1,0]"):
        with pytest.raises(ValueError, match="class_weights must be none, balanced or a list of positive numbers"):
            compose(["task=folder", wrong])


def test_weights_and_smoothing_are_part_of_the_training_loss_only():
    torch.manual_seed(0)
    logits, y, weights = torch.randn(4, 2), torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 5])
    target = TARGETS["class"](data_of("class", y.numpy()), 0.1, [1, 5])
    expected = F.cross_entropy(logits, y, weights, label_smoothing=0.1)
    torch.testing.assert_close(target.training_loss(logits, y), expected)
    torch.testing.assert_close(target.loss(logits, y), F.cross_entropy(logits, y))
    y = F.one_hot(y, 2).float()
    target = TARGETS["labels"](data_of("labels", y.numpy()), 0.1, [1, 5])
    expected = F.binary_cross_entropy_with_logits(logits, 0.9 * y + 0.05, pos_weight=weights)
    torch.testing.assert_close(target.training_loss(logits, y), expected)
    torch.testing.assert_close(target.loss(logits, y), F.binary_cross_entropy_with_logits(logits, y))


def test_a_run_trains_with_the_weights_of_its_experiment(tmp_path):
    weighted = experiment(tmp_path, "labels", class_weights=[1000, 1000, 1000], epochs=1)
    loop.train(weighted, tmp_path / "run", quiet=True)
    (line,) = table(tmp_path / "run" / "metrics.csv")
    assert float(line["train/loss"]) > 50 > 5 > float(line["val/loss"])
