"""Training that begins with the weights of another model (init=...)."""

import csv
import dataclasses

import pytest
import torch

from mrconv import reparameterize
from mrconv.inference import load_model, save
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.training import loop
from mrconv.training.composition import compose
from mrconv.training.datamodule import prepare
from mrconv.training.initial_weights import encoded_for, load_initial_weights
from mrconv.training.module import build_model
from mrconv.training.run_names import recipe_changes

from .miniature import data, listops, make_trainer, small, stopping_trainer, train_without_figures

FROZEN = {"lr": 0.0, "kernel_lr": 0.0, "precise_stats": 0, "momentum": 1e-6}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return the folder of a trained run, and that of its data."""
    folder = tmp_path_factory.mktemp("first")
    train_without_figures(listops(data_dir=str(folder / "data"), epochs=2), folder / "run")
    return folder / "run", folder / "data"


def new_model(prepared, **options):
    """Return a small model for some data, with randomised statistics."""
    model = build_model(small(compose([]), **options), prepared)
    for name, buffer in model.named_buffers():
        if "running_" in name:
            buffer.uniform_(0.5, 2)
    return model


def saved_model(folder, prepared, **options):
    """Save a model as a run does; return it."""
    model = new_model(prepared, **options)
    save(model, folder, Preprocessor.from_data(prepared))
    return model


def first_epoch(folder):
    """Return the metrics of the first epoch of a run."""
    with (folder / "metrics.csv").open() as file:
        return {name: float(value) for name, value in next(csv.DictReader(file)).items()}


@pytest.mark.usefixtures("without_figures")
def test_training_begins_with_weights_and_statistics_of_the_run(first, tmp_path):
    run, folder = first
    experiment = listops(data_dir=str(folder), epochs=1, init=str(run), seed=5, **FROZEN)
    result = loop.train(experiment, tmp_path / "run", quiet=True)
    before, after = (load_model(each / "model").state_dict() for each in (run, tmp_path / "run"))
    for name, x in after.items():
        if "num_batches" not in name:
            torch.testing.assert_close(x, before[name], rtol=1e-4, atol=1e-4, msg=name)
    initial = result["environment"]["initial"]
    assert not initial["new_head"]
    assert len(initial["weights_sha256"]) == 64
    assert recipe_changes(result["config"])["init"] == result["config"]["init"] == str(run)


@pytest.mark.usefixtures("without_figures")
def test_a_second_schedule_starts_below_the_loss_of_the_first(first, tmp_path):
    run, folder = first
    for name, init in (("second", str(run)), ("random", "")):
        loop.train(listops(data_dir=str(folder), epochs=1, dropout=0, init=init), tmp_path / name, quiet=True)
    assert first_epoch(tmp_path / "second")["train/loss"] < first_epoch(tmp_path / "random")["train/loss"]


@pytest.mark.usefixtures("without_figures")
def test_a_run_resumes_from_its_checkpoint_and_not_from_the_initial_weights(first, tmp_path, monkeypatch):
    run, folder = first
    experiment = listops(data_dir=str(folder), epochs=2, init=str(run))
    loop.train(experiment, tmp_path / "whole", quiet=True)
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(6))
    with pytest.raises(SystemExit):
        loop.train(experiment, tmp_path / "part", quiet=True)
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    monkeypatch.setattr(loop, "load_initial_weights", lambda *_: pytest.fail("loaded again"))
    result = loop.train(experiment, tmp_path / "part", quiet=True)
    assert not result["environment"]["initial"]["new_head"]
    whole, part = (load_model(tmp_path / name / "model").state_dict() for name in ("whole", "part"))
    assert all(torch.equal(x, part[name]) for name, x in whole.items())


@pytest.mark.parametrize("task", ["listops", "scifar", "retrieval", "characters"])
def test_a_model_of_the_same_classes_is_loaded_whole(task, tmp_path):
    prepared = data(task)
    source, model = saved_model(tmp_path, prepared), new_model(prepared)
    assert not load_initial_weights(model, prepared, str(tmp_path))["new_head"]
    assert all(torch.equal(x, source.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_other_classes_get_a_new_head(task, tmp_path):
    prepared = data(task)
    source = saved_model(tmp_path, prepared)
    for classes in (("yes", "no"), ("no", "yes", "perhaps")):
        other = dataclasses.replace(prepared, classes=classes)
        model = new_model(other)
        head = model.head.weight.clone()
        assert load_initial_weights(model, other, str(tmp_path))["new_head"]
        assert torch.equal(model.head.weight, head)
        assert all(
            torch.equal(x, source.backbone.state_dict()[name]) for name, x in model.backbone.state_dict().items()
        )


def test_sparse_kernels_keep_their_positions(tmp_path):
    prepared, options = data("listops"), {"kernel": "sparse", "kernel_size": 4}
    source, model = saved_model(tmp_path, prepared, **options), new_model(prepared, **options)
    positions = [name for name in source.state_dict() if name.endswith("index")]
    assert any(not torch.equal(source.state_dict()[name], model.state_dict()[name]) for name in positions)
    load_initial_weights(model, prepared, str(tmp_path))
    assert all(torch.equal(source.state_dict()[name], model.state_dict()[name]) for name in positions)


def test_the_model_sets_the_architecture_unless_an_experiment_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"d_model": 12, "depth": 3, "kernel": "dilated", "kernel_size": 4, "bidirectional": True}
    saved_model(tmp_path / "model", data("listops"), **options)
    experiment = compose(["task=folder", "init=model/", "lr=0.01", "norm=batch"])
    assert {name: getattr(experiment, name) for name in options} == options
    assert (experiment.lr, experiment.dropout, experiment.init) == (0.01, 0.0, "model")
    assert experiment.name == "folder-init-model-lr0.01"
    assert compose(["experiment=listops-base", "init=model"]).d_model == 128


def test_the_mixer_of_the_model_is_kept(tmp_path):
    saved_model(tmp_path, data("listops"), mixer="s4d", mixer_options={"d_state": 6})
    experiment = compose(["task=folder", f"init={tmp_path}"])
    assert (experiment.mixer, experiment.mixer_options) == ("s4d", {"d_state": 6})


def test_custom_texts_take_the_vocabulary_of_the_model(tmp_path):
    for name, letters in (("a", "abcd"), ("b", "acé")):
        lines = "".join(f"{letters[i % len(letters)] * (3 + i % 5)},{'xy'[i % 2]}\n" for i in range(40))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    settings = [f"cache_dir={tmp_path / 'cache'}", "task=folder", "task.length=10"]
    prepared = prepare(compose([*settings, f"data={tmp_path / 'a.csv'}"]))
    saved_model(tmp_path / "model", prepared)
    experiment = compose([*settings, f"data={tmp_path / 'b.csv'}", f"init={tmp_path / 'model'}"])
    encoded = encoded_for(prepare(experiment), experiment.init, tmp_path / "no run yet")
    assert encoded.vocabulary == prepared.vocabulary
    assert "é" not in encoded.vocabulary
    ids = {encoded.vocabulary[i] for i in encoded.splits["train"].x.tolist()}
    assert {"a", "c", "<unk>"} <= ids <= {"a", "c", "<unk>", "<eos>"}
    assert not load_initial_weights(build_model(experiment, encoded), encoded, experiment.init)["new_head"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 64}, r"its model has the length 128, the data 64; custom data takes task\.length=128"),
        ({"vocabulary": tuple("abcdefghijklmnopqrs")}, "its vocabulary of 18 symbols has no <unk> and lacks some of"),
    ],
)
def test_data_that_does_not_fit_is_rejected(changes, message, tmp_path):
    prepared = data("listops")
    saved_model(tmp_path, prepared)
    other = dataclasses.replace(prepared, **changes)
    with pytest.raises(ValueError, match=message):
        load_initial_weights(new_model(other), other, str(tmp_path))


def test_another_sampling_rate_is_rejected(tmp_path):
    prepared = data("speech")
    slow, fast = (dataclasses.replace(prepared, facts={"sample_rate": rate}) for rate in (8000, 16000))
    saved_model(tmp_path, fast)
    with pytest.raises(
        ValueError, match=r"takes 16,000 samples a second, the data has 8,000; .*task\.sample_rate=16000"
    ):
        load_initial_weights(new_model(slow), slow, str(tmp_path))


def test_another_architecture_is_rejected(tmp_path):
    prepared = data("listops")
    saved_model(tmp_path, prepared)
    with pytest.raises(ValueError, match=r"its model has prenorm=False, this run prenorm=True"):
        load_initial_weights(new_model(prepared, prenorm=True), prepared, str(tmp_path))
    with pytest.raises(ValueError, match=r"its model has depth=2; leave out depth=3"):
        compose(["task=folder", f"init={tmp_path}", "depth=3"])


def test_what_is_no_trained_model_is_rejected(tmp_path):
    prepared = data("listops")
    with pytest.raises(
        FileNotFoundError, match=r"init=nowhere is neither a run nor a saved model: nowhere has no config"
    ):
        compose(["task=folder", "init=nowhere"])
    save(reparameterize(new_model(prepared)), tmp_path, Preprocessor.from_data(prepared))
    with pytest.raises(ValueError, match="its model is merged and has no branches to train; give the run itself"):
        load_initial_weights(new_model(prepared), prepared, str(tmp_path))
