"""Presets: complete, with the paper's values; each trains, resumes, evaluates and merges."""

import dataclasses
import json
import re
from importlib import resources

import pytest
import yaml
from torch import nn

from mrconv.training import Experiment, evaluation, loop
from mrconv.training import paper_numbers as paper
from mrconv.training.composition import compose, compose_sweep
from mrconv.training.evaluation import evaluate, merge
from mrconv.training.module import Training, build_model
from mrconv.training.presets import experiment_names, find_preset, get_preset, preset_of_run, presets, variants

from ..conftest import slow_except
from .miniature import data, small

IMAGES = ("imagenet", "cifar")  # in test_vision.py
PRESETS = [preset for preset in presets() if not preset.experiment.startswith(IMAGES)]
LAYER = ["kernel", "kernel_size", "combine", "decay", "norm"]
MODEL = ["depth", "d_model", "bidirectional", "block_norm", "prenorm", "dropout", "pool", "mask_padding", "momentum"]
RECIPE = ["lr", "kernel_lr", "weight_decay", "batch_size", "epochs", "warmup_epochs", "clip", "ema", "seed"]

TABLE_KEYS = (
    "kernel", "depth", "d_model", "kernel_size", "bidirectional", "block_norm", "prenorm", "dropout", "kernel_lr", "lr",
    "weight_decay", "batch_size", "epochs",
)  # fmt: skip
# The paper's tables of hyperparameters, column by column as printed.
TABLES = {
    "listops-base": ("fourier", 8, 128, 2, False, "batch", False, 0.05, 0.001, 0.003, 0.05, 50, 40),
    "text-base": ("fourier", 6, 256, 1, False, "batch", True, 0.05, 0.001, 0.005, 0.05, 16, 32),
    "retrieval-base": ("fourier", 6, 256, 1, False, "batch", True, 0.05, 0.001, 0.003, 0.05, 64, 20),
    "image-base": ("dilated", 6, 512, 8, False, "layer", False, 0.1, 0.001, 0.0045, 0.05, 50, 200),
    "pathfinder-base": ("fourier+sparse", 6, 256, 16, True, "batch", True, 0.1, 0.001, 0.005, 0.03, 64, 200),
    "pathx-base": ("fourier", 6, 256, 64, True, "batch", True, 0.0, 0.001, 0.004, 0.03, 16, 50),
    "scifar-base": ("dilated", 10, 512, 8, False, "layer", False, 0.2, 0.001, 0.0045, 0.05, 50, 300),
    "speech-base": ("fourier", 6, 128, 32, True, "batch", True, 0.1, 0.001, 0.005, 0.05, 16, 40),
    "listops-large": ("fourier", 16, 128, 1, False, "batch", False, 0.05, 0.001, 0.003, 0.05, 50, 40),
    "text-large": ("fourier+sparse", 6, 384, 1, False, "batch", True, 0.1, 0.001, 0.005, 0.05, 16, 32),
    "retrieval-large": ("fourier", 6, 384, 1, False, "batch", True, 0.0, 0.001, 0.003, 0.05, 64, 20),
    "image-large": ("dilated", 10, 512, 8, False, "layer", False, 0.2, 0.001, 0.0045, 0.05, 50, 200),
    "pathfinder-large": ("fourier+sparse", 12, 256, 32, True, "batch", True, 0.05, 0.001, 0.005, 0.03, 64, 200),
    "pathx-large": ("fourier", 12, 256, 64, True, "batch", True, 0.0, 0.001, 0.004, 0.03, 16, 50),
}
SUM, CONCAT = {"combine": "sum", "decay": None, "norm": "batch"}, {"combine": "concat", "decay": [1, 3], "norm": None}
SILENT = {"pool": "mean", "mask_padding": False, "momentum": 0.1, "warmup_epochs": 1, "clip": 0, "ema": 0, "seed": 0}
CHOSEN = {task: {"mask_padding": True, "decay_on": "all"} for task in ("text", "retrieval")}  # docs/recipe.md
CHOSEN["listops"] = {"mask_padding": True, "decay_on": "matrices"}
CHOSEN["pathfinder"] = {"tie_dropout": False}
# Kernel sizes of kernels other than the chosen one, where they are not the same.
SIZES = {
    "dilated": dict.fromkeys(("listops", "text", "retrieval"), 8),
    "fourier": {"image": 32, "scifar": 32},
    "fourier-sparse": {"image": 32, "scifar": 32},
}
ABLATIONS = {
    "listops-base": {
        "ablation-dense": {"kernel": "dense", "kernel_size": 2048, "norm": "none"},
        "ablation-multires": {"kernel": "dense", "kernel_size": 1, "norm": "scale"},
        "ablation-fourier": {"kernel_size": 1, "norm": "scale"},
        "ablation-batchnorm": {"kernel_size": 1},
        "ablation-depth": {"kernel_size": 1, "depth": 16},
    },
    "image-base": {
        "ablation-dense": {"kernel": "dense", "kernel_size": 1024, "norm": "none"},
        "ablation-multires": {"kernel": "dense", "kernel_size": 32, "norm": "scale"},
        "ablation-fourier": {"kernel": "fourier", "kernel_size": 32, "norm": "scale"},
        "ablation-batchnorm": {"kernel": "fourier", "kernel_size": 32},
        "ablation-depth": {"kernel": "fourier", "kernel_size": 32, "depth": 12},
    },
    "pathx-base": {
        "ablation-sum": SUM,
        "ablation-concat": {"decay": None, "norm": "scale"},
        "ablation-decay": {},
    },
    "scifar-base": {"ablation-depth6": {"depth": 6}, "ablation-depth8": {"depth": 8}, "ablation-depth10": {}},
}


def in_paper(preset):
    """Return the values that the paper prints for a preset, and ours where it prints none."""
    task, variant = preset.experiment.split("-")[0], preset.variant
    printed = dict(zip(TABLE_KEYS, TABLES[preset.experiment], strict=True))
    expected = {"task": task} | SILENT | CHOSEN.get(task, {}) | (CONCAT if task == "pathx" else SUM) | printed
    if variant.startswith("ablation"):
        return expected | ABLATIONS[preset.experiment][variant]
    if variant == "scale":
        return expected | {"norm": "scale"}
    if variant == "causal":
        return expected | {"bidirectional": False}
    if variant:
        kernel = variant.replace("-", "+")
        expected |= {"kernel": kernel, "kernel_size": SIZES[variant].get(task, printed["kernel_size"])}
    return expected | ({"depth": 12} if preset.name.startswith("image-large-fourier") else {})  # 7.7M parameters


@pytest.mark.parametrize("preset", [each for each in PRESETS if each.experiment in TABLES], ids=lambda each: each.name)
def test_a_preset_has_the_papers_values(preset):
    expected, values = in_paper(preset), preset.values()
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    "preset",
    slow_except(PRESETS, "", "ablation-dense", key=lambda preset: preset.variant),
    ids=lambda preset: preset.name,
)
def test_a_preset_sets_every_value(preset):
    values = preset.values()
    keys = LAYER if values.get("mixer", "mrconv") == "mrconv" else ["mixer_options"]
    assert {"name", "task", *keys, *MODEL, *RECIPE} <= set(values)
    experiment = compose([f"experiment={preset.experiment}", f"variant={preset.variant or 'null'}"])
    assert experiment == Experiment(**values)
    assert experiment.name == preset.name


RUN_ALWAYS = (
    "demo", "image-base", "listops-base-ablation-dense", "listops-s4", "pathx-base", "retrieval-base-fourier-sparse",
    "shakespeare", "speech-base-dilated", "text-base",
)  # fmt: skip
"""Presets that run in `make test`: every kind of data, of kernel and of norm, and a baseline."""


@pytest.mark.parametrize(
    "preset", slow_except(PRESETS, *RUN_ALWAYS, key=lambda preset: preset.name), ids=lambda preset: preset.name
)
def test_a_preset_trains_resumes_and_merges(preset, tmp_path, monkeypatch):
    experiment = Experiment(**preset.values())
    tiny = data(experiment.task)
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    monkeypatch.setattr("mrconv.training.evaluation.prepare", lambda *_: tiny)
    training_step, steps = Training.training_step, []

    def stops(self, batch, index):
        steps.append(self.global_step)
        if steps == [0, 1, 2]:
            raise RuntimeError("the power is out")
        return training_step(self, batch, index)

    monkeypatch.setattr(Training, "training_step", stops)
    with pytest.raises(RuntimeError, match="the power is out"):
        loop.train(small(experiment, epochs=2), tmp_path / "run", quiet=True)
    result = loop.train(small(experiment, epochs=2), tmp_path / "run", quiet=True)
    assert steps == [0, 1, 2, 2, 3]
    assert (result["partial"], result["epochs_done"]) == (False, 2)
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    metric = result["metric"]
    assert result[metric] == pytest.approx(result[f"merged_{metric}"], rel=1e-4)
    assert evaluate(tmp_path / "run", device="cpu") == result[f"merged_{metric}"]
    assert merge(tmp_path / "run")[1] < 1e-4


def test_a_baseline_is_evaluated_at_another_rate(tmp_path, monkeypatch):
    experiment, tiny, rates = compose(["experiment=speech-base", "mixer=s4d"]), data("speech"), []
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    monkeypatch.setattr("mrconv.training.evaluation.prepare", lambda *_: tiny)
    loop.train(small(experiment), tmp_path / "run", quiet=True)
    measure = evaluation.measure
    monkeypatch.setattr(evaluation, "measure", lambda *given: rates.append(given[4]) or measure(*given))
    evaluate(tmp_path / "run", ["task.rate=0.5"], device="cpu")
    assert rates == [0.5]


@pytest.mark.parametrize(("name", "count"), [("listops-s4", 815_186), ("listops-liquid-s4", 333_322)])
def test_baselines_have_the_published_sizes(name, count):
    like = dataclasses.replace(data("listops"), length=2048, classes=tuple("0123456789"))
    assert sum(p.numel() for p in build_model(compose([f"experiment={name}"]), like).parameters()) == count


def test_the_tables_of_the_paper_are_complete():
    assert (len(TABLES), sum(map(len, ABLATIONS.values()))) == (14, 16)
    names = [f"{name}-{kernel}" for name in TABLES for kernel in SIZES]
    names += [f"{name}-{variant}" for name, steps in ABLATIONS.items() for variant in steps]
    assert {*TABLES, *names} <= {preset.name for preset in PRESETS}
    assert all(paper.published(name) for name in (*TABLES, *names))


def test_every_experiment_has_its_variants():
    kernels = ["dilated", "fourier", "fourier-sparse"]
    for name in experiment_names():
        expected = list(ABLATIONS.get(name, {}))
        if name in TABLES or name.startswith("imagenet"):
            expected += kernels
        if name in TABLES and name.endswith("-base") and name != "pathx-base":
            expected.append("scale")
        if name == "speech-base":
            expected.append("causal")
        if name == "demo":
            expected += ABLATIONS["listops-base"]
        assert sorted(variants(name)) == sorted(expected), name
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", preset.name) for preset in presets())
    assert set(variants("speech-base")["causal"]) == {"bidirectional", "task_options"}


def test_no_two_experiments_differ_only_in_name():
    files = [get_preset(name).values() | {"name": ""} for name in experiment_names()]
    assert all(files.count(values) == 1 for values in files)


@pytest.mark.parametrize(
    ("former", "current"),
    [
        ("listops-base-fourier+sparse", "listops-base-fourier-sparse"),
        ("listops-ablation-dense", "listops-base-ablation-dense"),
        ("scifar-ablation-depth6", "scifar-base-ablation-depth6"),
        ("speech-causal", "speech-base-causal"),
        ("imagenet-tiny-fourier+sparse", "imagenet-tiny-fourier-sparse"),
        ("image-large-fourier", "image-large-fourier"),
    ],
)
def test_former_names_of_experiments_are_accepted(former, current):
    assert find_preset(former).name == current
    assert compose([f"experiment={former}"]) == compose([f"experiment={current}"])
    assert paper.published(former) == paper.published(current)


def test_a_sweep_over_variants_has_one_job_for_each():
    jobs = compose_sweep(["experiment=listops-base,image-base", "variant=null,dilated,fourier+sparse", "seed=0,1"])
    suffixes = ("", "-dilated", "-fourier-sparse")
    names = [f"{task}-base{suffix}" for task in ("listops", "image") for suffix in suffixes for _ in range(2)]
    assert [job.name for job in jobs] == names
    assert [job.seed for job in jobs] == 6 * [0, 1]


def test_a_run_belongs_to_the_preset_its_name_begins_with():
    assert preset_of_run("listops-base-fourier-lr1e-05", "listops") == get_preset("listops-base", "fourier")
    assert preset_of_run("listops-base-s4d", "listops") == get_preset("listops-base")
    assert preset_of_run("listops-s4d", "listops") == get_preset("listops-s4d")
    assert preset_of_run("listops-base", "image") is None
    assert preset_of_run("mine", "listops") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lrr=1"], "unknown key 'lrr'; did you mean 'lr'?"),
        (["experiment=listop-base"], "unknown experiment 'listop-base'; did you mean 'listops-base'?"),
        (["experiment=mine"], "unknown experiment 'mine'; `mrconv train --list` prints all"),
        (
            ["experiment=listops-base", "variant=scales"],
            "unknown variant 'scales' of listops-base; did you mean 'scale'?",
        ),
        (
            ["experiment=listops-s4", "variant=scale"],
            "unknown variant 'scale' of listops-s4; listops-s4 has no variants",
        ),
        (["experiment=listops-base-dilated", "variant=scale"], "write experiment=listops-base variant=scale"),
        (["variant=scale"], "variant needs experiment=NAME; `mrconv train --list` prints the variants of each"),
        (["experiment=demo", "experiment=demo"], "experiment is set twice; a sweep over several is written -m"),
        (["lr=fast"], "lr: Value 'fast' of type 'str' could not be converted to Float"),
        (["epochs=2.5"], "epochs: Value '2.5' of type 'float' could not be converted to Integer"),
        (["lr"], "settings are written KEY=VALUE; got 'lr'"),
        (["block_norm=group"], "block_norm must be one of batch, layer; got 'group'"),
        (["norm=instance"], "norm must be one of null, batch, scale, none; got 'instance'"),
        (["precision=fp8"], "precision must be one of auto, float32, bfloat16; got 'fp8'"),
        (["depth=0"], "depth must be at least 1; got 0"),
        (["lr=-1"], "lr must not be negative; got -1.0"),
        (["dropout=1.0"], r"dropout must be in \[0, 1\); got 1.0"),
        (["rate=0"], r"rate must be 1, 1/2, 1/3, \.\.\.; got 0.0$"),
        (["rate=8000"], r"rate must be 1, .* got 8000.0; samples a second are set by task\.sample_rate=8000"),
        (["task.rate=8000"], r"samples a second are set by task\.sample_rate=8000"),
        (["sample_rate=8000"], r"sample_rate is an option of a task \(folder\): write task\.sample_rate=8000"),
        (["momentum=0"], r"momentum must be in \(0, 1\]; got 0.0"),
        (["momentum=1.1"], r"momentum must be in \(0, 1\]; got 1.1"),
        (["pad=true"], "pad must be batch, max or a number of positions; got True"),
        (["name=''"], "name must be the name of a folder in out; got ''"),
        (["name=../elsewhere"], "name must be the name of a folder in out; got '../elsewhere'"),
        (["out=''"], "out must not be empty: the run's folder is created in it"),
        (["lr=inf"], "lr must be a finite number; got inf"),
        (["kernel_lr=nan"], "kernel_lr must be a finite number; got nan"),
        (["epochs=6", "stop_after=7"], "stop_after must be at most epochs, 6; got 7"),
        (["epochs=6", "cooldown_epochs=7"], "cooldown_epochs must be from 0 to epochs, 6; got 7"),
        (["cooldown_epochs=nan"], "cooldown_epochs must be from 0 to epochs, 40; got nan"),
        (["seed=-1"], "seed must be from 0 to 4294967295; got -1"),
        (["layer_scale=0.1"], "layer_scale needs depths: both are for image tasks"),
        (["patch_size=2"], "patch_size needs depths: both are for image tasks"),
        (["heads=2", "depths=[1,1]"], "heads is not an option of image models, which depths sets"),
        (["residual=float32", "depths=[1,1]"], "residual is not an option of image models, which depths sets"),
        (["clip=1", "strategy=fsdp"], "clip does not work with strategy=fsdp: set clip=0, or strategy=ddp"),
    ],
)
def test_bad_keys_and_values_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        compose(settings)


@pytest.mark.parametrize("name", ["listops-base", "text-base", "listops-s5", "speech-s5"])
def test_momentum_reaches_every_batch_norm(name):
    experiment = compose([f"experiment={name}", "momentum=0.03"])
    norms = [m for m in build_model(experiment, data(experiment.task)).modules() if isinstance(m, nn.BatchNorm1d)]
    assert len(norms) >= experiment.depth + experiment.prenorm
    assert {norm.momentum for norm in norms} == {0.03}


def test_options_of_a_task_are_set_by_name():
    experiment = compose(["experiment=listops-base", "task.train_size=10", "task.rate=0.5", "task_options={seed: 3}"])
    assert experiment.task_options == {"train_size": 10, "seed": 3}
    assert experiment.rate == 0.5
    assert compose(["task=folder", "task.sample_rate=8000"]).task_options == {"sample_rate": 8000}


def test_the_papers_sweep_is_a_file():
    sweep = yaml.safe_load((resources.files("mrconv.configs") / "sweep" / "paper.yaml").read_text())
    assert set(sweep["hydra"]["sweeper"]["params"]) == {"kernel_size", "lr", "dropout"}
