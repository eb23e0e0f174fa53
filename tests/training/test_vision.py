"""Training on pictures: what is done to them, the ready experiments, an epoch on generated files."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from mrconv import MRConvNeXt
from mrconv.tasks import Batch, Prepared, ResidentLoader, Split, data_loader
from mrconv.tasks.randaugment import NAMES as OPERATIONS
from mrconv.tasks.randaugment import apply, rand_augment
from mrconv.training import Experiment, loop
from mrconv.training import image_augmentation as augment
from mrconv.training import paper_numbers as paper
from mrconv.training.composition import compose
from mrconv.training.evaluation import evaluate, merge
from mrconv.training.module import build_model
from mrconv.training.presets import presets

from ..conftest import relative

PRESETS = [preset for preset in presets() if preset.experiment.startswith(("imagenet", "cifar"))]
KEYS = ["name", "task", "mixer", "kernel", "norm", "momentum", "patch_size", "depths", "dims", "kernel_sizes"]
KEYS += ["drop_path", "layer_scale", "dropout", "lr", "kernel_lr", "weight_decay", "batch_size", "epochs"]
KEYS += ["warmup_epochs", "clip", "ema", "label_smoothing", "randaugment", "crop", "flip", "erasing", "mixup", "cutmix"]


def pictures(rows=16, size=32):
    """Return data of which one class is bright on the left."""
    draw = np.random.default_rng(0)
    splits = {}
    for name in ("train", "val", "test"):
        y = np.arange(rows) % 2
        x = draw.integers(0, 128, (rows, size, size, 3)).astype(np.uint8)
        x[:, :, : size // 2] += (100 * y[:, None, None, None]).astype(np.uint8)
        splits[name] = Split(name, x, y)
    facts = {"size": size}
    return Prepared("cifar", "image", ("no", "yes"), size**2, splits, (), 3, 1 / 128, -0.5, facts=facts)


def small(experiment, **changes):
    stages = len(experiment.dims)
    reduced = {"depths": [1] * stages, "dims": [4] * stages, "batch_size": 4, "epochs": 1, "limit_train": 2}
    reduced |= {"kernel_sizes": [8, 4, 2, 1][:stages] if experiment.kernel_sizes else []}
    reduced |= {"devices": 1, "strategy": "auto", "workers": 0, "precision": "float32", "accelerator": "cpu"}
    return Experiment(**(vars(experiment) | reduced | changes))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_sets_every_value_and_runs(preset, tmp_path, monkeypatch):
    values = preset.values()
    assert set(KEYS) <= set(values)
    experiment = compose([f"experiment={preset.name}"])
    assert {key: getattr(experiment, key) for key in values} == values
    tiny = pictures()
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    monkeypatch.setattr("mrconv.training.evaluation.prepare", lambda *_: tiny)
    result = loop.train(small(experiment, randaugment=0.0), tmp_path / "run", quiet=True)  # not on arrays
    assert result["accuracy"] == result["merged_accuracy"]
    assert evaluate(tmp_path / "run", device="cpu") == result["accuracy"]
    assert merge(tmp_path / "run")[1] < 1e-4


def test_the_papers_models_are_all_there():
    for size, count in (("tiny", 30_365_224), ("small", 53_485_864), ("base", 92_941_032)):
        experiment = compose([f"experiment=imagenet-{size}-fourier"])
        data = Prepared("imagenet", "image", tuple(map(str, range(1000))), 224**2, {}, channels=3, facts={"size": 224})
        with torch.device("meta"):
            assert sum(p.numel() for p in build_model(experiment, data).parameters()) == count
        assert experiment.batch_size * experiment.devices == 4096
        assert paper.published(f"imagenet-{size}").accuracy > 82


def test_both_models_on_cifar_are_of_one_size_and_one_recipe():
    ours, other = (compose([f"experiment=cifar-{name}"]) for name in ("mrconvnext", "convnext"))
    apart = {key for key, value in vars(ours).items() if vars(other)[key] != value}
    assert apart == {"name", "mixer", "kernel_sizes"}
    sizes = [sum(p.numel() for p in build_model(each, pictures()).parameters()) for each in (ours, other)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_loaders_give_pictures_with_their_channels_first():
    data = pictures()
    expected = torch.from_numpy(data.splits["val"].x[:4]).permute(0, 3, 1, 2) / 128 - 0.5
    for loader in (data_loader(data, "val", 4), ResidentLoader(data, "val", 4, device="cpu")):
        assert torch.equal(next(iter(loader)).x, expected)


def test_a_run_that_was_stopped_goes_on_with_the_same_draws(tmp_path, monkeypatch):
    tiny = pictures()
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    recipe = {"crop": 4, "flip": True, "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "drop_path": 0.3, "limit_train": 0}
    experiment = small(compose(["experiment=cifar-mrconvnext"]), **recipe, epochs=2)
    whole = loop.train(experiment, tmp_path / "whole", quiet=True)

    stop = loop.Checkpoints.on_validation_end

    def stopping(self, trainer, module):
        stop(self, trainer, module)
        if trainer.current_epoch == 0:
            raise KeyError("stop")

    monkeypatch.setattr(loop.Checkpoints, "on_validation_end", stopping)
    with pytest.raises(KeyError, match="stop"):
        loop.train(experiment, tmp_path / "parts", quiet=True)
    monkeypatch.setattr(loop.Checkpoints, "on_validation_end", stop)
    parts = loop.train(experiment, tmp_path / "parts", quiet=True)
    assert parts["accuracy"] == whole["accuracy"]
    a, b = (MRConvNeXt.from_pretrained(tmp_path / name / "model").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def files(folder):
    """Write pictures of two colours, a folder for each."""
    for split in ("train", "val"):
        for name, colour in (("a", "red"), ("b", "blue")):
            (folder / "imagenet" / split / name).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (40 + i, 36), colour).save(folder / "imagenet" / split / name / f"{i}.JPEG")


def test_one_epoch_on_generated_files(tmp_path):
    files(tmp_path)
    experiment = small(compose(["experiment=imagenet-tiny"]), limit_train=0)
    experiment.task_options, experiment.data_dir = {"size": 32}, str(tmp_path)
    result = loop.train(experiment, tmp_path / "run", quiet=True)
    assert result["examples"] == {"train": 16, "val": 16}
    assert result["merged_accuracy"]["val"] == result["accuracy"]["val"]
    assert (tmp_path / "run" / "figures" / "maps.png").stat().st_size > 1000


def test_a_run_is_scored_at_another_size(tmp_path):
    files(tmp_path)
    experiment = small(compose(["experiment=imagenet-tiny-fourier"]), limit_train=0)
    experiment.task_options, experiment.data_dir = {"size": 32}, str(tmp_path)
    loop.train(experiment, tmp_path / "run", quiet=True)
    merged, branches = (
        evaluate(tmp_path / "run", ["task.size=48"], merged=each, device="cpu") for each in (True, False)
    )
    assert merged == branches
    with pytest.raises(ValueError, match="images have no sampling rate"):
        merge(tmp_path / "run", 0.5)


def test_pictures_need_stages():
    with pytest.raises(ValueError, match="cifar is a task of images: set depths, dims and kernel_sizes"):
        build_model(Experiment(task="cifar"), pictures())


def test_crops_are_shifts_with_zeros_coming_in():
    x = torch.arange(1.0, 65).reshape(1, 1, 8, 8).expand(500, 1, 8, 8)
    found = augment.crop_and_flip(x, 2, flip=False)
    whole = F.pad(x[0, 0], (2,) * 4)
    every = {tuple(whole[i : i + 8, j : j + 8].flatten().tolist()) for i in range(5) for j in range(5)}
    assert {tuple(each.flatten().tolist()) for each in found} == every
    flipped = augment.crop_and_flip(x, 0, flip=True)
    mirrored = (flipped == x.flip(3)).all((1, 2, 3))
    assert torch.equal(flipped[~mirrored], x[~mirrored])
    assert 0.4 < mirrored.float().mean() < 0.6


def test_erased_rectangles_are_noise_of_the_right_area():
    x = torch.zeros(2000, 2, 30, 40)
    found = (augment.erase(x, 0.25) != 0).any(1)
    area = found.float().mean((1, 2))
    assert (area > 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    some = area[area > 0]
    assert some.min() > 0.01
    assert some.max() < 0.36
    for mask in found[area > 0][:20]:
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_labels_are_shares_of_what_is_in_the_picture(mixup, cutmix):
    y = torch.tensor([0, 1, 2, 0])
    x = y[:, None, None, None].expand(4, 1, 16, 16) == torch.arange(3)[:, None, None]  # plane k is 1 for class k
    kinds = set()
    for _ in range(20):
        mixed, shares = augment.mix(x.float(), y, 3, mixup, cutmix)
        assert shares.sum(1) == pytest.approx(torch.ones(4))
        assert relative(mixed.mean((2, 3)), shares) < 1e-5
        kinds.add(mixed.unique().numel() <= 2)
    assert kinds == {False, True} if mixup and cutmix else kinds <= {bool(cutmix), True}


def test_nothing_is_changed_unless_asked_for():
    batch = Batch(torch.randn(4, 3, 8, 8), torch.arange(4))
    same = augment.augment(batch, Experiment(), 4)
    assert same.x is batch.x
    assert same.y is batch.y


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_change_a_picture_and_nothing_else(name):
    image = Image.fromarray(np.random.default_rng(0).integers(20, 200, (24, 32, 3), np.uint8))
    changed = apply(name, image, 0.9, random.Random(1))
    assert changed.size == image.size
    assert changed.mode == "RGB"
    assert np.array_equal(np.asarray(changed), np.asarray(apply(name, image, 0.9, random.Random(1))))
    assert not np.array_equal(np.asarray(changed), np.asarray(image))
    apply(name, image, 1.0, random.Random(2))
    apply(name, image, 0.0, random.Random(2))


def test_randaugment_draws_from_what_it_is_given():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8))
    found = [np.asarray(rand_augment(image, random.Random(seed))) for seed in range(30)]
    assert np.array_equal(found[3], np.asarray(rand_augment(image, random.Random(3))))
    untouched = [np.array_equal(each, np.asarray(image)) for each in found]
    assert 0 < sum(untouched) < 20
