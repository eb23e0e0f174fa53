"""Every ready experiment: says all of its values, builds, trains, evaluates, merges, goes on."""

import dataclasses
import json
from importlib import resources

import pytest
import yaml

from mrconv.training import paper, run
from mrconv.training.compose import composed, experiment_names
from mrconv.training.config import Experiment
from mrconv.training.evaluation import evaluate, merge
from mrconv.training.module import build_model

from .miniature import data, small

PICTURES = ("imagenet", "cifar")  # in test_vision.py
NAMES = [name for name in experiment_names() if not name.startswith(PICTURES)]
LAYER = ["kernel", "kernel_size", "combine", "decay", "norm"]
MODEL = ["depth", "d_model", "bidirectional", "block_norm", "prenorm", "dropout", "pool", "mask_padding", "momentum"]
RECIPE = ["lr", "kernel_lr", "weight_decay", "batch_size", "epochs", "warmup_epochs", "clip", "ema", "seed"]


def read(name):
    return yaml.safe_load((resources.files("mrconv.configs") / "experiment" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_says_all_of_its_values_and_runs(name, tmp_path, monkeypatch):
    written = read(name)
    own = LAYER if written.get("mixer", "mrconv") == "mrconv" else ["mixer_options"]
    assert {"name", "task", *own, *MODEL, *RECIPE} <= set(written)
    experiment = composed([f"experiment={name}"])
    assert {key: getattr(experiment, key) for key in written} == written
    assert experiment.name == name

    tiny = data(experiment.task)
    monkeypatch.setattr(run, "prepare", lambda *_: tiny)
    monkeypatch.setattr("mrconv.training.evaluation.prepare", lambda *_: tiny)
    result = run.train(small(experiment), tmp_path / "run", quiet=True)
    assert not result["partial"]
    metric = result["metric"]
    assert result[metric] == pytest.approx(result[f"merged_{metric}"], rel=1e-4)
    assert evaluate(tmp_path / "run", device="cpu") == result[f"merged_{metric}"]
    assert merge(tmp_path / "run")[1] < 1e-4
    longer = run.train(small(experiment, epochs=2, out="elsewhere"), tmp_path / "other", quiet=True)
    assert longer["config"]["epochs"] == 2
    assert json.loads((tmp_path / "other" / "result.json").read_text()) == longer


def test_a_peer_is_evaluated_at_another_rate(tmp_path, monkeypatch):
    experiment, tiny, rates = composed(["experiment=speech-base", "mixer=s4d"]), data("speech"), []
    monkeypatch.setattr(run, "prepare", lambda *_: tiny)
    monkeypatch.setattr("mrconv.training.evaluation.prepare", lambda *_: tiny)
    run.train(small(experiment), tmp_path / "run", quiet=True)
    score = run.score
    monkeypatch.setattr("mrconv.training.evaluation.score", lambda *given: rates.append(given[-1]) or score(*given))
    evaluate(tmp_path / "run", ["task.rate=0.5"], device="cpu")
    assert rates == [0.5]


@pytest.mark.parametrize(("name", "count"), [("listops-s4", 815_186), ("listops-liquid-s4", 333_322)])
def test_peers_have_the_published_sizes(name, count):
    like = dataclasses.replace(data("listops"), length=2048, classes=tuple("0123456789"))
    assert sum(p.numel() for p in build_model(composed([f"experiment={name}"]), like).parameters()) == count


def test_the_tables_of_the_paper_are_all_there():
    tasks = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
    base = [f"{task}-base" for task in (*tasks, "scifar", "speech")]
    large = [f"{task}-large" for task in tasks]
    kinds = [f"{name}-{kernel}" for name in base + large for kernel in ("dilated", "fourier", "fourier+sparse")]
    steps = ("dense", "multires", "fourier", "batchnorm", "depth")
    ablations = [f"{task}-ablation-{step}" for task in ("listops", "image") for step in steps]
    ablations += [f"pathx-ablation-{each}" for each in ("sum", "concat", "decay")]
    ablations += [f"scifar-ablation-depth{depth}" for depth in (6, 8, 10)]
    assert set(base + large + kinds + ablations) <= set(NAMES)
    assert all(paper.published(name) for name in base + large + ablations)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lrr=1"], "there is no key 'lrr'; did you mean 'lr'?"),
        (["experiment=listop-base"], "there is no experiment 'listop-base'; near it: listops-base"),
        (["lr=fast"], "lr: Value 'fast' of type 'str' could not be converted to Float"),
        (["epochs=2.5"], "epochs: Value '2.5' of type 'float' could not be converted to Integer"),
        (["lr"], "settings are written KEY=VALUE; got 'lr'"),
        (["block_norm=group"], "block_norm must be one of batch, layer; got 'group'"),
        (["norm=instance"], "norm must be one of null, batch, scale, none; got 'instance'"),
        (["precision=fp8"], "precision must be one of auto, float32, bfloat16; got 'fp8'"),
        (["depth=0"], "depth must be at least 1; got 0"),
        (["lr=-1"], "lr must not be negative; got -1.0"),
        (["dropout=1.0"], r"dropout must be in \[0, 1\); got 1.0"),
    ],
)
def test_bad_keys_and_values_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        composed(settings)


def test_options_of_a_task_are_set_by_name():
    experiment = composed(["experiment=listops-base", "task.train_size=10", "task.rate=0.5", "task_options={seed: 3}"])
    assert experiment.task_options == {"train_size": 10, "seed": 3}
    assert experiment.rate == 0.5


def test_the_papers_sweep_is_a_file():
    sweep = yaml.safe_load((resources.files("mrconv.configs") / "sweep" / "paper.yaml").read_text())
    assert set(sweep["hydra"]["sweeper"]["params"]) == {"kernel_size", "lr", "dropout"}


def test_every_key_is_told_about():
    about = Experiment.__doc__
    assert all(
        word in about for word in ("task_options", "kernel_lr", "warmup_epochs", "clip", "ema", "precision", "loader")
    )
