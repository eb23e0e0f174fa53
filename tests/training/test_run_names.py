"""Names of runs and of their folders."""

import dataclasses
import re

import pytest

from mrconv.training.composition import compose, compose_sweep
from mrconv.training.run_names import LONGEST, evaluation_name, recipe_changes

MACHINE = [
    "devices=2",
    "workers=3",
    "out=there",
    "data_dir=d",
    "precision=float32",
    "pad=max",
    "compile=true",
    "seed=3",
    "stop_after=2",
]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["experiment=listops-base"], "listops-base"),
        (["experiment=listops-base", "variant=dilated"], "listops-base-dilated"),
        (["experiment=listops-base", "lr=0.01"], "listops-base-lr0.01"),
        (["experiment=listops-base", "variant=dilated", "lr=1e-5", "depth=4"], "listops-base-dilated-depth4-lr1e-05"),
        (["experiment=listops-base", "lr=0.003"], "listops-base"),
        (["experiment=pathx-base", "variant=ablation-decay"], "pathx-base-ablation-decay"),
        (["experiment=pathx-base", "decay=[1.0,2.0]"], "pathx-base-decay1.0-2.0"),
        (["experiment=listops-base", "mixer=s4d", "mixer.d_state=8"], "listops-base-s4d-mixer.d_state8"),
        (["experiment=listops-s4d"], "listops-s4d"),
        (["experiment=listops-base", "kernel=fourier+sparse"], "listops-base-kernel-fourier-sparse"),
        (["experiment=listops-base", "norm=null", "bucket=false"], "listops-base-bucket-false-norm-null"),
        (["experiment=listops-base", "task.train_size=10"], "listops-base-task.train_size10"),
        (["experiment=cifar-mrconvnext", "kernel_sizes=[8,4,2]"], "cifar-mrconvnext-kernel_sizes8-4-2"),
        (["experiment=listops-base", *MACHINE], "listops-base"),
        (["experiment=listops-base", "lr=0.01", "name=mine"], "mine"),
        (["experiment=listops-base", "lr=0.01", "name=listops-base"], "listops-base"),
        (["experiment=listops-base", "variant=fourier-sparse", "name=old-fourier+sparse"], "old-fourier+sparse"),
        (["depth=4", "name=run"], "run"),
        (["task=image", "depth=4"], "image-depth4"),
        (["task=folder", "data=my recordings/", "depth=4"], "my-recordings-depth4"),
        (["task=folder", "data=a/b/words.npz"], "words"),
        ([], "listops"),
    ],
)
def test_a_run_is_named_after_what_differs_from_its_preset(settings, name):
    assert compose(settings).name == name


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["experiment=listops-base", "mixer=mrconv,s4d,s5"], ["listops-base", "listops-base-s4d", "listops-base-s5"]),
        (["experiment=listops-base", "precision=auto,float32"], ["listops-base", "listops-base-precision-float32"]),
        (["name=mine", "mixer=s4,s5", "lr=0.1"], ["mine-s4", "mine-s5"]),
        (["name=a,b"], ["a", "b"]),
        (["name=mine", "task.seed=1,2", "seed=4"], ["mine-task.seed1", "mine-task.seed2"]),
        (["name=mine", "task_options={seed: 1},{seed: 2}"], ["mine-task.seed1", "mine-task.seed2"]),
        (["experiment=demo", "depth=range(2,4)"], ["demo", "demo-depth3"]),
        (["task=folder", "data=a/x.npz,b/x.npz"], ["folder-data-a-x.npz", "folder-data-b-x.npz"]),
        (["task=image,text"], ["image", "text"]),
        (["experiment=listops-base,listops-s4", "lr=0.1"], ["listops-base-lr0.1", "listops-s4-lr0.1"]),
    ],
)
def test_the_jobs_of_a_sweep_have_different_names(settings, names):
    assert [job.name for job in compose_sweep(settings)] == names


@pytest.mark.slow
def test_the_papers_sweep_has_a_name_for_every_job():
    jobs = compose_sweep(["experiment=listops-base", "sweep=paper"])
    assert len({job.name for job in jobs}) == len(jobs) == 72
    assert "listops-base-dropout0.3-kernel_size32-lr0.007" in {job.name for job in jobs}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seed=1,1"], "jobs of the sweep share the folder runs/listops-seed1"),
        (["experiment=listops-base", "variant=dilated,scale", "name=mine"], "name cannot be set in a sweep over"),
    ],
)
def test_jobs_that_would_share_a_folder_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        compose_sweep(settings)


def test_a_long_name_is_cut_and_stays_unique():
    settings = ["experiment=listops-base", *(f"task.{key}=1000" for key in ("train_size", "val_size", "test_size"))]
    settings += ["depth=12", "d_model=512", "weight_decay=0.123", "warmup_epochs=3.5", "epochs=123", "dropout=0.1"]
    names = {compose([*settings, f"task.max_length={length}"]).name for length in (100, 200)}
    assert len(names) == 2
    for name in names:
        assert len(name) <= len("listops-base") + LONGEST
        assert re.fullmatch(r"listops-base-[A-Za-z0-9._-]+-[0-9a-f]{8}", name)


def test_a_record_older_than_a_key_has_the_former_value():
    config = dataclasses.asdict(compose(["experiment=pathfinder-base", "epochs=16"]))
    assert recipe_changes(config) == {"epochs": 16}
    del config["tie_dropout"], config["decay_on"]
    assert recipe_changes(config) == {"epochs": 16, "tie_dropout": True}


def test_evaluations_with_different_settings_have_different_names():
    assert evaluation_name({"rate": 0.5}) == "evaluate-rate0.5"
    assert evaluation_name({"rate": 0.5, "task.size": 48}) == "evaluate-rate0.5-task.size48"
    changes = [{"data": text} for text in ("a-b", "a/b", "a b", "/a/b", "é", "ü", "x" * 99, "x" * 98)]
    names = [evaluation_name(each) for each in changes]
    assert names[0] == "evaluate-data-a-b"
    assert len(set(names)) == len(changes)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
