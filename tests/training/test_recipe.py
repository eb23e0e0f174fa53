"""The recipe: parameter groups, schedule, loaders, precision, weight averaging, limits and records."""

import copy
import dataclasses
import math
from importlib.metadata import version

import pytest
import torch

from mrconv import param_groups
from mrconv.baselines import mixer_class
from mrconv.hub import MODEL
from mrconv.inference import load_model
from mrconv.tasks import Batch
from mrconv.training import Experiment, evaluation, loop, outputs, rundir
from mrconv.training.composition import compose
from mrconv.training.datamodule import TaskData
from mrconv.training.module import Training, average_statistics, build_model, logits
from mrconv.training.presets import presets
from mrconv.training.schedule import rate_factor
from mrconv.training.scores import SCORES, RunningScore
from mrconv.training.targets import Target

from .miniature import data, listops, small

pytestmark = pytest.mark.usefixtures("without_figures")


def test_the_learning_rate_rises_linearly_and_falls_as_half_a_cosine():
    factors = [rate_factor(step, 10, 110) for step in range(111)]
    assert factors[:11] == pytest.approx([i / 10 for i in range(11)])
    assert factors[60] == pytest.approx(0.5)
    assert factors[85] == pytest.approx(0.5 * (1 + math.cos(0.75 * math.pi)))
    assert factors[110] == pytest.approx(0, abs=1e-12)
    assert rate_factor(0, 0, 10) == 1


def test_with_a_cooldown_the_learning_rate_stays_until_the_last_epochs():
    settings = {"epochs": 20, "warmup_epochs": 2.0, "cooldown_epochs": 4.0}
    training = Training(listops(**settings), torch.nn.Linear(1, 1), Target(), SCORES["accuracy"], 5, ["val"])
    factor = training.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [factor(step) for step in range(11)] == pytest.approx([i / 10 for i in range(11)])
    assert {factor(step) for step in range(10, 81)} == {1}
    assert [factor(step) for step in (81, 85, 90, 95, 100, 101)] == pytest.approx(
        [1 - math.sqrt(i / 20) for i in (1, 5, 10, 15, 20, 20)]
    )
    assert {rate_factor(step, 0, 20, 0) for step in range(21)} == {1}
    first = [rate_factor(step, 4, 20, 20) for step in (0, 2, 4, 8, 20)]  # the cooldown begins after the warm-up
    assert first == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_a_cooldown_of_less_than_a_step_is_one_step():
    experiment = listops(epochs=2, warmup_epochs=0, cooldown_epochs=0.01)
    training = Training(experiment, torch.nn.Linear(1, 1), Target(), SCORES["accuracy"], 5, ["val"])
    factor = training.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [factor(step) for step in (8, 9, 10)] == [1, 1, 0]


@pytest.mark.parametrize("decay_on", ["matrices", "all"])
def test_kernels_have_their_own_learning_rate_and_no_weight_decay(decay_on):
    experiment = listops(lr=0.01, kernel_lr=0.002, weight_decay=0.3, decay_on=decay_on)
    tiny = data("listops")
    training = Training(experiment, build_model(experiment, tiny), Target(), SCORES["accuracy"], 5, ["val", "test"])
    optimizer = training.configure_optimizers()["optimizer"]
    by_name = {name: group for group in optimizer.param_groups for name in parameter_names(training, group)}
    kernel = by_name["model.backbone.blocks.0.layer.branches.0.kernel.modes"]
    assert (kernel["initial_lr"], kernel["weight_decay"]) == (0.002, 0.0)
    for name in ("norm.weight", "norm.bias", "mix.bias", "layer.branches.0.alpha", "layer.branches.0.norm.weight"):
        vector = by_name[f"model.backbone.blocks.0.{name}"]
        assert (vector["initial_lr"], vector["weight_decay"]) == (0.01, 0.3 if decay_on == "all" else 0.0)
    linear = by_name["model.backbone.blocks.0.mix.weight"]
    assert (linear["initial_lr"], linear["weight_decay"]) == (0.01, 0.3)
    assert len(by_name) == len(list(training.parameters()))


def test_parameters_of_a_mixer_can_have_a_learning_rate_of_their_own():
    experiment = listops(mixer="s4d", lr=0.01, kernel_lr=0.002, weight_decay=0.3, mixer_lr={"C": 0.005, "log_dt": 0.02})
    training = Training(
        experiment, build_model(experiment, data("listops")), Target(), SCORES["accuracy"], 5, ["val", "test"]
    )
    groups = training.configure_optimizers()["optimizer"].param_groups
    rates = {name: (g["initial_lr"], g["weight_decay"]) for g in groups for name in parameter_names(training, g)}
    expected = {"C": (0.005, 0.3), "log_dt": (0.02, 0.0), "B": (0.002, 0.0), "D": (0.01, 0.3)}
    assert {name: rates[f"model.backbone.blocks.1.layer.{name}"] for name in expected} == expected
    assert sum(len(group["params"]) for group in groups) == len(rates) == len(list(training.parameters()))
    experiment.mixer_lr = {"weight": 0.1}  # of the encoder, not of the mixer
    with pytest.raises(ValueError, match="mixer_lr: the mixer has no parameter weight of its own"):
        training.configure_optimizers()


@pytest.mark.parametrize("rate", [-0.1, True, "fast", math.inf, None])
def test_learning_rates_of_a_mixer_are_checked(rate):
    with pytest.raises(ValueError, match=r"^mixer_lr\.C must be a learning rate, 0 or more; got "):
        listops(mixer_lr={"C": rate}).check()


@pytest.mark.parametrize("preset", [each for each in presets() if each.values().get("mixer_lr")], ids=lambda p: p.name)
def test_the_learning_rates_of_presets_are_those_of_parameters(preset):
    e = compose([f"experiment={preset.name}"])
    mixer = mixer_class(e.mixer)(8, 16, **(e.mixer_options | ({"n_ssm": 2} if e.mixer_options.get("n_ssm") else {})))
    groups = param_groups(mixer, e.lr, e.weight_decay, e.kernel_lr, mixer_lr=e.mixer_lr)
    assert {group["lr"] for group in groups} == {e.lr, e.kernel_lr, *e.mixer_lr.values()}


def parameter_names(module, group):
    return [name for name, p in module.named_parameters() if any(p is q for q in group["params"])]


@pytest.mark.parametrize(
    ("task", "residual", "dtype"),
    [
        ("image", "auto", torch.bfloat16),
        ("image", "float32", torch.float32),
        ("listops", "auto", torch.float32),
        ("listops", "float32", torch.float32),
    ],
)
def test_the_residual_stream_has_the_dtype_that_was_chosen(task, residual, dtype):
    experiment, dtypes = small(Experiment(task=task, residual=residual)), []
    model = build_model(experiment, data(task))
    Training(experiment, model, Target(), SCORES["accuracy"], 5, ["val"])
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda block, inputs, y: dtypes.append((inputs[0].dtype, y.dtype)))
    batch = torch.randint(1, 10, (2, 60)) if task == "listops" else torch.randn(2, 60, 1)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch).sum().backward()
    assert set(dtypes) == {(dtype, dtype)}


@pytest.mark.parametrize(("settings", "steps"), [({"warmup_epochs": 2.0}, 10), ({"warmup_steps": 7}, 7)])
def test_warm_up_takes_epochs_or_steps(settings, steps):
    experiment = listops(epochs=4, **settings)
    training = Training(experiment, build_model(experiment, data("listops")), Target(), SCORES["accuracy"], 5, ["val"])
    factor = training.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert factor(steps - 1) == pytest.approx((steps - 1) / steps)
    assert factor(steps) == 1


@pytest.mark.parametrize("kernel", ["fourier", "dilated"])
def test_precise_statistics_are_averages_over_batches_of_the_present_weights(kernel):
    tiny, generator = data("image"), torch.Generator().manual_seed(0)
    model = build_model(listops(kernel=kernel, kernel_size=2, dropout=0.5, prenorm=True), tiny).double().train()
    x = torch.randn(3, 4, tiny.length, tiny.channels, generator=generator, dtype=torch.float64)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm1d)}
    expected = {name: [] for name in norms}
    for each in x:  # momentum 1 keeps the statistics of the last batch
        copied = copy.deepcopy(model).eval()
        for name in norms:
            norm = copied.get_submodule(name).train()
            norm.momentum = 1.0
        with torch.no_grad():
            copied(each)
        for name in norms:
            norm = copied.get_submodule(name)
            expected[name].append(torch.stack([norm.running_mean, norm.running_var]))
    for norm in norms.values():
        norm.running_var.fill_(7.0)  # what was there before has no influence
    before = torch.get_rng_state()
    average_statistics(model, [Batch(each, torch.zeros(4)) for each in x])
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)  # dropout is off
    for name, norm in norms.items():
        assert (norm.training, norm.momentum) == (True, 0.1)
        actual = torch.stack([norm.running_mean, norm.running_var])
        torch.testing.assert_close(actual, torch.stack(expected[name]).mean(0), rtol=1e-9, atol=1e-11)


def test_precise_statistics_change_scores_and_not_the_training(trained, tmp_path):
    options = {"epochs": 2, "limit_train": 5, "dropout": 0.1}
    weights, losses = [], []
    for precise_stats in (0, 3):
        folder = tmp_path / f"run{len(weights)}"
        trained("image", precise_stats=precise_stats, **options)
        state = torch.load(folder / "last.ckpt", weights_only=True)
        weights.append({name: x for name, x in state["state_dict"].items() if "running" not in name})
        losses.append([row["val/loss"] for row in state["mrconv"]["history"]])
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items() if "num_batches" not in name)
    assert all(a != b for a, b in zip(*losses, strict=True))


@pytest.mark.parametrize("mask_padding", [True, False])
def test_statistics_come_from_mixed_lengths_if_padding_is_masked(mask_padding):
    tokens, device = data("listops", 64), torch.device("cpu")
    batches = []
    for bucket in (False, True):
        module = TaskData(listops(bucket=bucket, mask_padding=mask_padding, batch_size=8, precise_stats=4), tokens)
        batches.append([batch.x for batch in module.statistics_batches(1, device)])
    mixed, bucketed = batches
    assert len(mixed) == 4
    assert all(torch.equal(a, b) for a, b in zip(mixed, bucketed, strict=True)) == mask_padding


@pytest.mark.parametrize("bucket", [True, False])
def test_statistics_come_from_batches_spread_over_the_epoch(bucket):
    experiment = listops(bucket=bucket, mask_padding=False, batch_size=4, precise_stats=4)
    module, device = TaskData(experiment, data("listops", 64)), torch.device("cpu")
    training = module.loader("train", True, device)
    training.set_epoch(1)
    every = [batch.x for batch in training]
    statistics = [batch.x for batch in module.statistics_batches(1, device)]
    assert len(every) == 16
    assert all(torch.equal(a, b) for a, b in zip(statistics, every[2::4], strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_saved_model_has_statistics_of_float32(trained, tmp_path, precision):
    trained("image", precision=precision, precise_stats=3, limit_train=5)
    experiment, images = rundir.read_run(tmp_path / "run0"), data("image", 64)
    best, epoch, _ = loop.load_best_model(tmp_path / "run0", images, experiment)
    expected = copy.deepcopy(best)
    average_statistics(expected, TaskData(experiment, images).statistics_batches(epoch - 1, torch.device("cpu")))
    saved, differs = load_model(tmp_path / "run0" / MODEL).state_dict(), []
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(saved[name], x)
        differs.append(not torch.allclose(saved[name], best.state_dict()[name]))
    assert any(differs) == (precision == "bfloat16")  # which rounds the activations


def test_without_a_validation_split_the_test_split_is_monitored():
    assert TaskData(listops(), data("text")).monitored == "test"
    assert TaskData(listops(), data("listops")).monitored == "val"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    def train(task="listops", **changes):
        tiny = data(task, 64)
        monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return loop.train(
            small(listops(task=task), **({"limit_train": 0, "dropout": 0.0} | changes)), folder, quiet=True
        )

    return train


def test_a_model_learns(trained):
    assert trained("image", epochs=6, lr=0.02)["accuracy"]["test"] > 0.9


@pytest.mark.parametrize("change", [{"loader": "resident"}, {"loader": "workers"}, {"pad": "max"}, {"bucket": True}])
def test_every_loader_trains(trained, change):
    assert 0 <= trained(**change)["accuracy"]["test"] <= 1


def test_both_loaders_give_the_same_result(trained):
    assert trained(loader="resident")["accuracy"] == trained(loader="workers")["accuracy"]


def test_bfloat16_clipping_and_averaging_train(trained):
    assert trained("image", precision="bfloat16", clip=1.0, ema=0.9, epochs=2)["merged_accuracy"]["test"] >= 0


def test_too_few_examples_raise_an_error(trained):
    with pytest.raises(ValueError, match="64 training examples do not fill one batch of 100"):
        trained(batch_size=100)


def test_a_record_contains_versions_sizes_and_settings(trained):
    result = trained()
    assert result["environment"]["torch"] == version("torch")
    assert result["examples"] == {"train": 64, "val": 64, "test": 64}
    assert result["classes"] == 2
    assert result["parameters"] > 0
    assert result["config"]["lr"] == 0.003
    assert result["seconds"] > 0


def test_a_record_contains_the_source_of_its_data(tmp_path):
    result = loop.train(listops(data_dir=str(tmp_path), epochs=1), tmp_path / "run", quiet=True)
    assert result["data"]["source"] == "generated"
    assert rundir.scalar_facts({"root": "/there", "files": True, "words": ["a"], "size": 3}) == {
        "files": True,
        "size": 3,
    }


def test_scores_weight_batches_by_their_size():
    scores = RunningScore(SCORES["accuracy"])
    scores.update(torch.eye(3), torch.tensor([0, 1, 1]), torch.tensor(2.0))
    scores.update(torch.eye(3)[:1], torch.tensor([0]), torch.tensor(6.0))
    assert {name: value.item() for name, value in scores.compute_and_reset().items()} == {"loss": 3.0, "accuracy": 0.75}
    assert scores.compute_and_reset() == {}


def test_a_limit_of_evaluation_does_not_select_the_shortest_sequences(monkeypatch):
    tiny, cpu, seen = data("listops", 128), torch.device("cpu"), []
    tiny = dataclasses.replace(tiny, splits={"train": tiny.splits["train"], "val": tiny.splits["val"]})
    lengths = sorted(tiny.splits["val"].lengths)  # 8 batches of 16
    for limit, expected in ((2, [2, 6]), (1, [4]), (9, range(8)), (0, range(8))):
        experiment = listops(batch_size=4, limit_eval=limit)
        batches = [lengths[16 * i : 16 * (i + 1)] for i in expected]
        loader = TaskData(experiment, tiny).loader("val", False, cpu)
        assert len(loader) == len(batches)
        assert [batch.lengths.tolist() for batch in loader] == batches
        monkeypatch.setattr(
            outputs, "logits", lambda model, batch, rate: seen.append(batch) or logits(model, batch, rate)
        )
        loop.score(build_model(experiment, tiny), tiny, experiment, cpu)
        assert [batch.lengths.tolist() for batch in seen] == batches
        seen.clear()


def test_a_run_trained_with_a_limit_is_evaluated_without(tmp_path):
    experiment = listops(data_dir=str(tmp_path), batch_size=1, limit_eval=1, limit_train=2, epochs=1)
    loop.train(experiment, tmp_path / "run", quiet=True)

    def examples(*settings):
        measured = evaluation.measure_run(tmp_path / "run", settings, device="cpu")
        return sum(values["examples"] for values in measured.metrics.values())

    assert examples() == 20
    assert examples("limit_eval=2") == 12  # in each split the first and the last of three batches, 4 and 2 examples


@pytest.mark.parametrize("change", [{"mixup": 0.5}, {"flip": True}, {"depths": [1, 1]}])
def test_options_of_image_tasks_are_rejected_elsewhere(trained, change):
    (key,) = change
    with pytest.raises(ValueError, match=f"{key} can only be used with images.*; listops has "):
        trained(**change)
