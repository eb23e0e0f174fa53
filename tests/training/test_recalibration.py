"""Evaluation with statistics averaged again, over training examples of the evaluated data."""

import json

import numpy as np
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import mrconv
from mrconv.cli import main
from mrconv.inference import load_model
from mrconv.training import evaluation
from mrconv.training.composition import compose
from mrconv.training.evaluation import measure_run

from .miniature import small, train_without_figures
from .test_targets import X, experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run whose saved statistics are far from those of its data."""
    folder = tmp_path_factory.mktemp("recalibration")
    train_without_figures(experiment(folder, "class", batch_size=32, limit_train=1), folder / "run")
    model = load_model(folder / "run" / "model")
    for norm in norms(model):
        norm.running_mean.fill_(3.0)
        norm.running_var.fill_(50.0)
    model.save_pretrained(folder / "run" / "model")
    return folder / "run"


def norms(model):
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def examples(measured, split):
    """Return the numbers of a split's examples in the file."""
    return [int(line["example"].removeprefix("example ")) - 1 for line in measured.lines if line["split"] == split]


def probabilities(measured, split):
    return torch.tensor([float(line["p(1)"]) for line in measured.lines if line["split"] == split])


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_statistics_are_those_of_the_training_examples_at_the_rate(run, rate, merged):
    measured = measure_run(run, [f"rate={rate}"], merged, recalibrate=True)
    test, rest = examples(measured, "test"), {*examples(measured, "val"), *examples(measured, "test")}
    train = [i for i in range(len(X)) if i not in rest]
    assert len(train) == 32  # one batch
    predictor = mrconv.load(run)
    scaled = (X * predictor.preprocessor.scale + predictor.preprocessor.shift).astype(np.float32)
    inputs = torch.from_numpy(scaled[..., None][:, :: round(1 / rate)])
    model = load_model(run / "model").eval()
    for norm in norms(model):
        norm.train()
        norm.momentum = 1.0  # keeps the statistics of the last batch
    with torch.no_grad():
        model(inputs[train], rate=rate)
        expected = model.eval()(inputs[test], rate=rate).softmax(-1)[:, 1]
    # a variance below eps has few digits in float32
    torch.testing.assert_close(probabilities(measured, "test"), expected, rtol=0, atol=3e-3)
    usual = measure_run(run, [f"rate={rate}"], merged=False)
    assert (probabilities(usual, "test") - expected).abs().max() > 0.05


def test_the_model_keeps_its_statistics_and_the_scores_have_their_own_folder(run, capsys):
    before = (run / "model" / "model.safetensors").read_bytes()
    assert main(["evaluate", str(run), "--recalibrate", "--device", "cpu"]) == 0
    assert f"in {run / 'evaluate-recalibrate-true'}: metrics.json" in capsys.readouterr().out
    written = json.loads((run / "evaluate-recalibrate-true" / "metrics.json").read_text())
    assert written["changes"] == {"recalibrate": True}
    assert (run / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_merged_model_with_new_statistics_is_saved(run, rate, capsys):
    options = [] if rate is None else ["--rate", str(rate)]
    assert main(["reparameterize", str(run), "--recalibrate", *options]) == 0
    name = "merged-recalibrated" if rate is None else f"merged-{rate}-recalibrated"
    assert capsys.readouterr().out.splitlines()[-1] == str(run / name)
    measured = measure_run(run, [] if rate is None else [f"rate={rate}"], recalibrate=True)
    predictor = mrconv.load(run / name)
    found = [predictor.predict(X[i][:: 1 if rate is None else 2]) for i in examples(measured, "test")]
    expected = probabilities(measured, "test")
    torch.testing.assert_close(torch.tensor([p.probabilities["1"] for p in found]), expected, rtol=1e-4, atol=1e-5)
    assert "accuracy" not in predictor.model.results


def test_other_data_may_have_fewer_examples_than_a_batch_and_no_splits(run, tmp_path):
    np.savez(tmp_path / "few.npz", x=X[:5], y=np.array([0, 1, 0, 1, 1]))
    few = [f"data={tmp_path / 'few.npz'}"]
    measured = measure_run(run, few, recalibrate=True)
    assert (list(measured.metrics), measured.metrics["all"]["examples"]) == (["all"], 5)
    assert not torch.allclose(probabilities(measured, "all"), probabilities(measure_run(run, few), "all"))


def test_a_run_with_patience_or_another_metric_is_recalibrated(tmp_path):
    early = experiment(tmp_path, "class", patience=1, monitor="f1", batch_size=32, limit_train=1)
    train_without_figures(early, tmp_path / "run")
    assert measure_run(tmp_path / "run", recalibrate=True).metrics["val"]["examples"] == 4


def test_a_language_model_counts_windows(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 100)
    settings = [f"task.path={text}", "task.length=32", f"data_dir={tmp_path}", "kernel_size=4", "bidirectional=false"]
    trained = small(compose(["task=characters", *settings]), batch_size=4)
    train_without_figures(trained, tmp_path / "run")
    assert measure_run(tmp_path / "run", ["batch_size=1000"], recalibrate=True).changes["batch_size"] == 1000


def test_a_batch_size_has_its_own_folder(run):
    assert measure_run(run, ["batch_size=8"], recalibrate=True).changes == {"batch_size": 8, "recalibrate": True}
    assert measure_run(run, ["batch_size=8"]).changes == {}


def test_data_without_training_examples_is_rejected(run, monkeypatch):
    data = evaluation.prepare(evaluation.read_run(run))
    del data.splits["train"]
    monkeypatch.setattr(evaluation, "prepare", lambda *given: data)
    with pytest.raises(ValueError, match="folder has no training examples to recalibrate with; it has val, test"):
        measure_run(run, recalibrate=True)


def test_a_model_without_batchnorm_is_rejected(tmp_path, capsys):
    plain = experiment(tmp_path, "class", norm="scale", block_norm="layer")
    train_without_figures(plain, tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(tmp_path / "run"), "--recalibrate", "--device", "cpu"])
    assert "the model has no BatchNorm, so there are no statistics to recalibrate" in capsys.readouterr().err
    assert not (tmp_path / "run" / "evaluate-recalibrate-true").exists()
