"""Training that begins with the weights of another model (init=...)."""

import csv
import dataclasses
import shutil

import numpy as np
import pytest
import torch

from mrconv import SequenceClassifier, reparameterize
from mrconv.cli import main
from mrconv.inference import load_model, save
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.training import loop, report, rundir
from mrconv.training.composition import compose
from mrconv.training.datamodule import prepare
from mrconv.training.initial_weights import describe, encoded, initial_model, load_initial_weights
from mrconv.training.module import build_model

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
    for name in ("listops-base", "mine"):
        assert f"init={run}" in " ".join(report.notes({**result, "name": name}))


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
    moved = run.rename(tmp_path / "moved")  # the run goes on without it
    result = loop.train(experiment, tmp_path / "part", quiet=True)
    moved.rename(run)
    assert not result["environment"]["initial"]["new_head"]
    whole, part = (load_model(tmp_path / name / "model").state_dict() for name in ("whole", "part"))
    assert all(torch.equal(x, part[name]) for name, x in whole.items())


@pytest.mark.parametrize("task", ["listops", "scifar", "retrieval", "characters"])
def test_a_model_of_the_same_classes_is_loaded_whole(task, tmp_path):
    prepared = data(task)
    source, model = saved_model(tmp_path, prepared), new_model(prepared)
    assert not load_initial_weights(model, prepared, tmp_path)["new_head"]
    assert all(torch.equal(x, source.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_other_classes_get_a_new_head(task, tmp_path):
    prepared = data(task)
    source = saved_model(tmp_path, prepared)
    for classes in (("yes", "no"), ("no", "yes", "perhaps")):
        other = dataclasses.replace(prepared, classes=classes)
        model = new_model(other)
        head = model.head.weight.clone()
        assert load_initial_weights(model, other, tmp_path)["new_head"]
        assert torch.equal(model.head.weight, head)
        assert all(
            torch.equal(x, source.backbone.state_dict()[name]) for name, x in model.backbone.state_dict().items()
        )


def test_sparse_kernels_keep_their_positions(tmp_path):
    prepared, options = data("listops"), {"kernel": "sparse", "kernel_size": 4}
    source, model = saved_model(tmp_path, prepared, **options), new_model(prepared, **options)
    positions = [name for name in source.state_dict() if name.endswith("index")]
    assert any(not torch.equal(source.state_dict()[name], model.state_dict()[name]) for name in positions)
    load_initial_weights(model, prepared, tmp_path)
    assert all(torch.equal(source.state_dict()[name], model.state_dict()[name]) for name in positions)


def test_settings_that_differ_are_listed(tmp_path):
    prepared = data("listops")
    options = {"d_model": 12, "kernel": "dilated", "kernel_size": 4, "prenorm": True, "dropout": 0.3}
    saved_model(tmp_path, prepared, **options)
    with pytest.raises(ValueError, match="has other settings; add ") as error:
        load_initial_weights(new_model(prepared, eps=1e-3), prepared, tmp_path)
    added = str(error.value).partition("; add ")[2].split()
    assert set(added) == {"kernel=dilated", "kernel_size=4", "d_model=12", "prenorm=true", "eps=1e-05"}
    options = {name: getattr(compose(added), name) for name, _, _ in (text.partition("=") for text in added)}
    load_initial_weights(new_model(prepared, **options), prepared, tmp_path)


@pytest.mark.parametrize(
    ("there", "here", "added"),
    [
        ({"n_heads": 2}, {}, "mixer.n_heads=2"),
        ({}, {"n_heads": 2}, "mixer.n_heads=4"),
        ({"positions": "none"}, {"n_heads": 4}, "mixer.positions=none"),
        ({}, {"bidirectional": True}, "mixer.bidirectional=false"),
    ],
)
def test_options_of_a_mixer_that_differ_are_listed(there, here, added, tmp_path):
    prepared = data("listops")
    saved_model(tmp_path, prepared, mixer="attention", mixer_options=there, norm="none")
    with pytest.raises(ValueError, match=f"has other settings; add {added}$"):
        load_initial_weights(new_model(prepared, mixer="attention", mixer_options=here), prepared, tmp_path)
    with pytest.raises(ValueError, match=r"has other settings; add mixer=attention( mixer\.\w+=\w+)?$"):
        load_initial_weights(new_model(prepared), prepared, tmp_path)
    load_initial_weights(new_model(prepared, mixer="attention", mixer_options=there), prepared, tmp_path)


@pytest.mark.parametrize(
    ("mixer", "there", "here", "added"),
    [
        ("sgconv", {}, {"decay": 1.0}, "mixer.decay=2.0"),
        ("mrhyena", {"eps": 0.01}, {}, "mixer.eps=0.01"),
        ("mrhyena", {"d_conv": 2}, {}, "mixer.d_conv=2"),
        ("longconv", {}, {"kernel_dropout": 0.5, "init": "random"}, None),
        ("s4d", {"dt_min": 0.01}, {}, None),
    ],
)
def test_options_that_a_mixer_shares_with_the_model_are_compared_and_initial_values_are_not(
    mixer, there, here, added, tmp_path
):
    prepared = data("listops")
    saved_model(tmp_path, prepared, mixer=mixer, mixer_options=there)
    model = new_model(prepared, mixer=mixer, mixer_options=here)
    if added is None:
        load_initial_weights(model, prepared, tmp_path)
    else:
        with pytest.raises(ValueError, match=f"has other settings; add {added}$"):
            load_initial_weights(model, prepared, tmp_path)


def texts(folder, name, letters):
    """Return the settings of custom texts of some letters."""
    lines = "".join(f"{letters[i % len(letters)] * (3 + i % 5)},{'xy'[i % 2]}\n" for i in range(40))
    (folder / f"{name}.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    return [f"cache_dir={folder / 'cache'}", "task=folder", "task.length=10", f"data={folder / name}.csv"]


def test_custom_texts_take_the_vocabulary_of_the_model(tmp_path):
    prepared = prepare(compose(texts(tmp_path, "a", "abcd")))
    saved_model(tmp_path / "model", prepared)
    other = prepare(compose(texts(tmp_path, "b", "acé")))
    changed = encoded(other, tmp_path / "model")
    assert changed.vocabulary == prepared.vocabulary
    assert "é" not in changed.vocabulary
    symbols, before = (
        np.array(each.vocabulary, object)[each.splits["train"].x.astype(int)] for each in (changed, other)
    )
    assert (symbols == np.where(before == "é", "<unk>", before)).all()
    initial = load_initial_weights(new_model(changed), changed, tmp_path / "model")
    assert initial["unknown_symbols"] == (before == "é").mean() > 0
    assert not initial["new_head"]
    assert describe("RUN", initial).startswith("starting from RUN, with its head; ")
    assert describe("RUN", initial).endswith("% of the training symbols are <unk>")


def test_a_language_model_takes_the_vocabulary_of_the_model_for_inputs_and_targets(tmp_path):
    prepared = data("characters")
    saved_model(tmp_path, prepared)
    novel = dataclasses.replace(prepared, vocabulary=("<unk>", *"hgfedcbaz"))
    split, changed = novel.splits["val"], encoded(novel, tmp_path)
    for name in ("x", "y"):
        before = np.array(novel.vocabulary)[getattr(split, name)]
        after = np.array(prepared.vocabulary)[getattr(changed.splits["val"], name)]
        assert (after == np.where(before == "z", "<unk>", before)).all()
    assert not load_initial_weights(new_model(changed), changed, tmp_path)["new_head"]


def test_both_sequences_of_a_pair_take_the_vocabulary_of_the_model(tmp_path):
    prepared = data("retrieval")
    saved_model(tmp_path, prepared)
    reverse = dataclasses.replace(prepared, vocabulary=prepared.vocabulary[::-1])
    split, changed = reverse.splits["train"], encoded(reverse, tmp_path)
    for name in ("x", "x2"):
        before, after = getattr(split, name).astype(int), getattr(changed.splits["train"], name).astype(int)
        assert (np.array(prepared.vocabulary)[after] == np.array(reverse.vocabulary)[before]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 64}, "length of the data: 64; of .*: 128; custom data takes task.length=128$"),
        (
            {"vocabulary": tuple(map(str, range(19)))},
            "lacks 1 of the data's symbols, the first '18', and only",
        ),
        (
            {"vocabulary": (*map(str, range(18)), "<eos>")},
            "sequences of the data end with <eos>, those of the",
        ),
        ({"vocabulary": tuple("abcdefghijklmnopqr")}, "kind of the data: text; of .*: tokens$"),
    ],
)
def test_data_that_does_not_fit_is_rejected(changes, message, tmp_path):
    prepared = data("listops")
    saved_model(tmp_path, prepared)
    with pytest.raises(ValueError, match=message):
        encoded(dataclasses.replace(prepared, **changes), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"facts": {"sample_rate": 8000}}, "sample rate of the data: 8000; .*: 16000; .*takes task.sample_rate=16000$"),
        ({"facts": {}}, "kind of the data: values; of .*: audio$"),
        ({"channels": 2}, "channels of the data: 2; of .*: 1$"),
    ],
)
def test_values_that_do_not_fit_are_rejected(changes, message, tmp_path):
    prepared = dataclasses.replace(data("speech"), facts={"sample_rate": 16000})
    saved_model(tmp_path, prepared)
    with pytest.raises(ValueError, match=message):
        encoded(dataclasses.replace(prepared, **changes), tmp_path)


def test_a_model_without_a_preprocessor_takes_numbered_symbols(tmp_path):
    prepared = data("listops")
    model = new_model(prepared)
    model.save_pretrained(tmp_path)
    assert encoded(prepared, tmp_path) is prepared
    assert load_initial_weights(new_model(prepared), prepared, tmp_path)["new_head"]  # its classes have no names
    shifted = dataclasses.replace(prepared, vocabulary=("<pad>", *map(str, range(17))))
    with pytest.raises(ValueError, match=r"has no inputs\.json, which names the symbols of a model"):
        load_initial_weights(new_model(shifted), shifted, tmp_path)


def test_a_model_saved_for_another_rate_is_rejected(tmp_path):
    prepared = data("speech")
    model = SequenceClassifier(n_classes=2, d_input=1, d_model=8, depth=2, l_max=prepared.length, rate=0.5)
    save(model, tmp_path, Preprocessor.from_data(prepared))
    with pytest.raises(ValueError, match=r"runs at rate 0.5; give the one that was trained"):
        load_initial_weights(new_model(prepared), prepared, tmp_path)


def test_a_fine_tuned_language_model_is_evaluated_on_its_own_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = [
        "task=characters",
        "task.length=32",
        "cache_dir=cache",
        "d_model=8",
        "depth=1",
        "batch_size=4",
        "epochs=1",
    ]
    for name, letters in (("first", "abcdefgh"), ("second", "abcz")):
        (tmp_path / f"{name}.txt").write_text(letters * (4000 // len(letters)))
        initial = ["init=runs/first-seed0"] * (name == "second")
        assert main(["train", *common, f"data={name}.txt", f"name={name}", "limit_train=2", *initial]) == 0
    assert main(["evaluate", "runs/second-seed0"]) == 0


def test_what_is_no_trained_model_is_rejected(first, tmp_path):
    run, _ = first
    with pytest.raises(FileNotFoundError, match=r"init=nowhere is neither a run nor a saved model: it has no config"):
        initial_model("nowhere", tmp_path)
    with pytest.raises(ValueError, match="is the folder of this run: give the run another name"):
        initial_model(str(run), run)
    with pytest.raises(ValueError, match="is the folder of this run: give the run another name"):
        initial_model(str(run / "model"), run)
    (tmp_path / "run").mkdir()
    shutil.copy(run / rundir.CONFIG, tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="is a run that has not ended: `mrconv finish"):
        initial_model(str(tmp_path / "run"), tmp_path / "new")
    shutil.copy(run / rundir.RESULT, tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="is the record of a run without its weights"):
        initial_model(str(tmp_path / "run"), tmp_path / "new")
    prepared = data("listops")
    save(reparameterize(new_model(prepared)), tmp_path / "merged", Preprocessor.from_data(prepared))
    with pytest.raises(ValueError, match="holds a merged model, without branches to train; give the run itself"):
        load_initial_weights(new_model(prepared), prepared, tmp_path / "merged")


def test_the_name_of_a_run_has_its_initial_model():
    assert compose(["task=folder", "init=model/", "lr=0.01", "d_model=12"]).name == "folder-d_model12-init-model-lr0.01"
    assert compose(["experiment=listops-base", "init=runs/first-seed0"]).name == "listops-base-init-runs-first-seed0"
