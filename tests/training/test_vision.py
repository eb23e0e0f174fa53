"""Training on images: augmentation, presets, and an epoch on generated files."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from mrconv import MRConvNeXt, inference
from mrconv.tasks import Batch, Prepared, ResidentLoader, Split, data_loader
from mrconv.tasks.imagenet import ImageFiles
from mrconv.tasks.randaugment import NAMES as OPERATIONS
from mrconv.tasks.randaugment import apply, rand_augment
from mrconv.training import Experiment, evaluation, loop
from mrconv.training import image_augmentation as augment
from mrconv.training import paper_numbers as paper
from mrconv.training.composition import compose
from mrconv.training.datamodule import TaskData, prepare
from mrconv.training.evaluation import evaluate, merge
from mrconv.training.module import build_model
from mrconv.training.presets import presets

from ..conftest import relative, slow_except

PRESETS = [preset for preset in presets() if preset.experiment.startswith(("imagenet", "cifar"))]
KEYS = ["name", "task", "mixer", "kernel", "norm", "momentum", "patch_size", "depths", "dims", "kernel_sizes"]
KEYS += ["drop_path", "layer_scale", "dropout", "lr", "kernel_lr", "weight_decay", "batch_size", "epochs"]
KEYS += ["warmup_epochs", "clip", "ema", "label_smoothing", "randaugment", "crop", "flip", "erasing", "mixup", "cutmix"]


def images(examples=16, size=32):
    """Return data with one class that is bright on the left."""
    generator = np.random.default_rng(0)
    splits = {}
    for name in ("train", "val", "test"):
        y = np.arange(examples) % 2
        x = generator.integers(0, 128, (examples, size, size, 3)).astype(np.uint8)
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
def test_a_preset_sets_every_value(preset):
    values = preset.values()
    assert set(KEYS) <= set(values)
    assert compose([f"experiment={preset.name}"]) == Experiment(**values)


@pytest.mark.parametrize(
    "preset",
    slow_except(PRESETS, "cifar-convnext", "imagenet-tiny-dilated", key=lambda preset: preset.name),
    ids=lambda preset: preset.name,
)
def test_a_preset_trains_and_merges(preset, tmp_path, monkeypatch):
    experiment = Experiment(**preset.values())
    tiny = images()
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    monkeypatch.setattr("mrconv.training.evaluation.prepare", lambda *_: tiny)
    result = loop.train(small(experiment, randaugment=0.0), tmp_path / "run", quiet=True)  # it needs files
    assert result["accuracy"] == result["merged_accuracy"]
    assert evaluate(tmp_path / "run", device="cpu") == result["accuracy"]
    assert merge(tmp_path / "run")[1] < 1e-4


def test_presets_of_the_papers_models_have_their_parameter_counts():
    for size, count in (("tiny", 30_365_224), ("small", 53_485_864), ("base", 92_941_032)):
        experiment = compose([f"experiment=imagenet-{size}-fourier"])
        data = Prepared("imagenet", "image", tuple(map(str, range(1000))), 224**2, {}, channels=3, facts={"size": 224})
        with torch.device("meta"):
            assert sum(p.numel() for p in build_model(experiment, data).parameters()) == count
        assert experiment.batch_size * experiment.devices == 4096
        assert paper.published(f"imagenet-{size}").accuracy > 82


def test_both_cifar_models_have_the_same_size_and_recipe():
    ours, other = (compose([f"experiment=cifar-{name}"]) for name in ("mrconvnext", "convnext"))
    different = {key for key, value in vars(ours).items() if vars(other)[key] != value}
    assert different == {"name", "mixer", "kernel_sizes"}
    sizes = [sum(p.numel() for p in build_model(each, images()).parameters()) for each in (ours, other)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_loaders_return_images_with_channels_first():
    data = images()
    expected = torch.from_numpy(data.splits["val"].x[:4]).permute(0, 3, 1, 2) / 128 - 0.5
    for loader in (data_loader(data, "val", 4), ResidentLoader(data, "val", 4, device="cpu")):
        assert torch.equal(next(iter(loader)).x, expected)


@pytest.mark.slow
def test_a_stopped_run_resumes_with_the_same_random_numbers(tmp_path, monkeypatch):
    tiny = images()
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    recipe = {"crop": 4, "flip": True, "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "drop_path": 0.3, "limit_train": 0}
    experiment = small(compose(["experiment=cifar-mrconvnext"]), **recipe, epochs=2)
    uninterrupted = loop.train(experiment, tmp_path / "uninterrupted", quiet=True)

    on_validation_end = loop.Checkpoints.on_validation_end

    def stop(self, trainer, module):
        on_validation_end(self, trainer, module)
        if trainer.current_epoch == 0:
            raise KeyError("stop")

    monkeypatch.setattr(loop.Checkpoints, "on_validation_end", stop)
    with pytest.raises(KeyError, match="stop"):
        loop.train(experiment, tmp_path / "resumed", quiet=True)
    monkeypatch.setattr(loop.Checkpoints, "on_validation_end", on_validation_end)
    resumed = loop.train(experiment, tmp_path / "resumed", quiet=True)
    assert resumed["accuracy"] == uninterrupted["accuracy"]
    a, b = (MRConvNeXt.from_pretrained(tmp_path / name / "model").state_dict() for name in ("uninterrupted", "resumed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def write_files(folder):
    """Write images of two colours, a folder for each."""
    for split in ("train", "val"):
        for name, colour in (("a", "red"), ("b", "blue")):
            (folder / "imagenet" / split / name).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (40 + i, 36), colour).save(folder / "imagenet" / split / name / f"{i}.JPEG")


def test_one_epoch_on_generated_files(tmp_path):
    write_files(tmp_path)
    experiment = small(compose(["experiment=imagenet-tiny"]), limit_train=0)
    experiment.task_options, experiment.data_dir = {"size": 32}, str(tmp_path)
    result = loop.train(experiment, tmp_path / "run", quiet=True)
    assert result["examples"] == {"train": 16, "val": 16}
    assert result["merged_accuracy"]["val"] == result["accuracy"]["val"]
    assert (tmp_path / "run" / "figures" / "maps.png").stat().st_size > 1000


def test_statistics_come_from_training_files_as_evaluation_reads_them(tmp_path):
    write_files(tmp_path)
    for path in tmp_path.glob("imagenet/train/*/*.JPEG"):
        Image.effect_noise((40, 36), 80).convert("RGB").save(path)  # a crop or a flip changes it
    experiment = small(compose(["experiment=imagenet-tiny"]), precise_stats=2)
    experiment.task_options, experiment.data_dir = {"size": 32}, str(tmp_path)
    module, device = TaskData(experiment, prepare(experiment)), torch.device("cpu")
    training = module.loader("train", True, device)
    training.set_epoch(1)
    augmented = [batch.x for batch in training]
    statistics = [batch.x for batch in module.statistics_batches(1, device)]
    training.set_epoch(1)
    assert all(torch.equal(a, batch.x) for a, batch in zip(augmented, training, strict=True))
    files = ImageFiles(module.data, "train", train=False)
    plan = dataclasses.replace(training.plan, limit=2)
    expected = [torch.stack([files[i][0] for i in batch]) for batch in plan.batches(1)]
    assert all(torch.equal(a, b) for a, b in zip(statistics, expected, strict=True))


def test_a_run_is_evaluated_at_another_image_size(tmp_path):
    write_files(tmp_path)
    experiment = small(compose(["experiment=imagenet-tiny-fourier"]), limit_train=0)
    experiment.task_options, experiment.data_dir = {"size": 32}, str(tmp_path)
    loop.train(experiment, tmp_path / "run", quiet=True)
    merged, branches = (
        evaluate(tmp_path / "run", ["task.size=48"], merged=each, device="cpu") for each in (True, False)
    )
    assert merged == branches
    with pytest.raises(ValueError, match="images have no sampling rate"):
        merge(tmp_path / "run", 0.5)


def test_images_need_stages():
    with pytest.raises(ValueError, match="cifar is a task of images: set depths, dims and kernel_sizes"):
        build_model(Experiment(task="cifar"), images())


def test_crops_are_shifts_with_zero_padding():
    x = torch.arange(1.0, 65).reshape(1, 1, 8, 8).expand(500, 1, 8, 8)
    crops = augment.crop_and_flip(x, 2, flip=False)
    padded = F.pad(x[0, 0], (2,) * 4)
    every = {tuple(padded[i : i + 8, j : j + 8].flatten().tolist()) for i in range(5) for j in range(5)}
    assert {tuple(each.flatten().tolist()) for each in crops} == every
    border = augment.crop_and_flip(torch.ones(50, 2, 8, 8), 2, False, np.array([-3.0, 5.0]))
    assert (border[:, 0].unique().tolist(), border[:, 1].unique().tolist()) == ([-3.0, 1.0], [1.0, 5.0])
    flipped = augment.crop_and_flip(x, 0, flip=True)
    mirrored = (flipped == x.flip(3)).all((1, 2, 3))
    assert torch.equal(flipped[~mirrored], x[~mirrored])
    assert 0.4 < mirrored.float().mean() < 0.6


def test_erased_rectangles_have_the_right_area():
    x = torch.zeros(2000, 2, 30, 40)
    erased = (augment.erase(x, 0.25) != 0).any(1)
    area = erased.float().mean((1, 2))
    assert (area > 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert area[area > 0].min() > 0.01
    assert area.max() < 0.36
    for mask in erased[area > 0][:20]:
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_labels_of_mixed_images_are_the_fractions_of_their_classes(mixup, cutmix):
    y = torch.tensor([0, 1, 2, 0])
    x = y[:, None, None, None].expand(4, 1, 16, 16) == torch.arange(3)[:, None, None]  # plane k is 1 for class k
    kinds = set()
    for _ in range(20):
        mixed, labels = augment.mix(x.float(), y, 3, mixup, cutmix)
        assert labels.sum(1) == pytest.approx(torch.ones(4))
        assert relative(mixed.mean((2, 3)), labels) < 1e-5
        kinds.add(mixed.unique().numel() <= 2)
    assert kinds == {False, True} if mixup and cutmix else kinds <= {bool(cutmix), True}


def test_the_default_experiment_does_not_augment():
    batch = Batch(torch.randn(4, 3, 8, 8), torch.arange(4))
    same = augment.augment(batch, Experiment(), images())
    assert same.x is batch.x
    assert same.y is batch.y


def test_rotations_are_the_four_by_right_angles():
    x = torch.arange(50.0).reshape(1, 2, 5, 5).expand(200, 2, 5, 5)
    every = [x[0].rot90(k, (1, 2)) for k in range(4)]
    found = [[torch.equal(rotated, each) for each in every].index(True) for rotated in augment.rotate(x)]
    assert set(found) == {0, 1, 2, 3}


def pixels(data):
    """Return images as sequences of pixels."""
    height, width = data.image_size
    splits = {
        name: dataclasses.replace(split, x=split.x.reshape(len(split), -1, data.channels))
        for name, split in data.splits.items()
    }
    return dataclasses.replace(data, encoder="values", splits=splits, facts={"height": height, "width": width})


def test_pixels_in_a_sequence_are_augmented_like_an_image():
    recipe = Experiment(crop=3, flip=True, rotate=True, erasing=0.5, cutmix=1.0)
    data = images()
    batches = [next(iter(data_loader(each, "val", 8))) for each in (data, pixels(data))]
    augmented = []
    for batch, each in zip(batches, (data, pixels(data)), strict=True):
        torch.manual_seed(1)
        augmented.append(augment.augment(batch, recipe, each))
    image, sequence = augmented
    assert torch.equal(sequence.x, image.x.flatten(2).transpose(1, 2))
    assert torch.equal(sequence.y, image.y)
    assert not torch.equal(sequence.x, batches[1].x)


def test_a_run_on_pixels_augments_its_training_batches_only(tmp_path, monkeypatch):
    data, calls = pixels(images()), []
    monkeypatch.setattr(loop, "prepare", lambda *_: data)
    monkeypatch.setattr(
        "mrconv.training.datamodule.augment", lambda *args: calls.append(args) or augment.augment(*args)
    )
    experiment = Experiment(
        task="image", depth=1, d_model=4, batch_size=4, epochs=1, flip=True, rotate=True, mixup=0.2, accelerator="cpu"
    )
    loop.train(experiment, tmp_path / "run", quiet=True)
    assert len(calls) == 4  # 16 training images; validation and test are as they are


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotate": True}, "rotate needs square images; cifar has 32 x 16 pixels"),
        ({"mixup": 0.5, "target": "labels"}, "mixup and cutmix are for classes; cifar has target=labels"),
        ({"flip": True, "target": "positions"}, "flip can only be used with images, or all of their pixels"),
        ({"dims": [4]}, "dims can only be used with images; cifar has sequences"),
    ],
)
def test_keys_that_do_not_fit_sequences_of_pixels_are_rejected(change, message):
    data = dataclasses.replace(pixels(images()), target=change.get("target", "class"))
    data = dataclasses.replace(data, facts={"height": 32, "width": 16})
    with pytest.raises(ValueError, match=message):
        TaskData(Experiment(task="folder", **change), data)


def test_pixels_at_another_rate_are_not_augmented_and_not_recalibrated_so(tmp_path, monkeypatch):
    data = pixels(images(size=8))
    with pytest.raises(ValueError, match="flip can only be used with images, or all of their pixels"):
        TaskData(Experiment(task="folder", flip=True), data.decimated(0.5))
    monkeypatch.setattr(loop, "prepare", lambda *_: data)
    monkeypatch.setattr(evaluation, "prepare", lambda e, *_: data if e.rate == 1 else data.decimated(e.rate))
    options = {"d_model": 4, "batch_size": 4, "precise_stats": 2, "accelerator": "cpu", "kernel": "fourier"}
    loop.train(Experiment(task="image", depth=1, epochs=1, flip=True, crop=1, **options), tmp_path, quiet=True)
    measured = evaluation.measure_run(tmp_path, ["rate=0.5"], recalibrate=True)
    assert measured.changes == {"rate": 0.5, "recalibrate": True}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_change_an_image_but_not_its_size(name):
    image = Image.fromarray(np.random.default_rng(0).integers(20, 200, (24, 32, 3), np.uint8))
    changed = apply(name, image, 0.9, random.Random(1))
    assert changed.size == image.size
    assert changed.mode == "RGB"
    assert np.array_equal(np.asarray(changed), np.asarray(apply(name, image, 0.9, random.Random(1))))
    assert not np.array_equal(np.asarray(changed), np.asarray(image))
    apply(name, image, 1.0, random.Random(2))
    apply(name, image, 0.0, random.Random(2))


def test_randaugment_uses_the_given_generator():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8))
    augmented = [np.asarray(rand_augment(image, random.Random(seed))) for seed in range(30)]
    assert np.array_equal(augmented[3], np.asarray(rand_augment(image, random.Random(3))))
    unchanged = [np.array_equal(each, np.asarray(image)) for each in augmented]
    assert 0 < sum(unchanged) < 20


def test_a_folder_of_rectangular_images_trains_predicts_and_evaluates(tmp_path):
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / "files" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (24, 16), colour).save(tmp_path / "files" / name / f"{i}.png")
    settings = ["depths=[1,1]", "dims=[4,4]", "kernel_sizes=[4,2]", "patch_size=4", "batch_size=4", "epochs=1"]
    settings += ["task=folder", f"data={tmp_path / 'files'}", "task.sequence=false", "accelerator=cpu"]
    result = loop.train(compose([*settings, f"data_dir={tmp_path}"]), tmp_path / "run", quiet=True)
    predictor = inference.load(tmp_path / "run")
    assert (predictor.model.image_size, predictor.preprocessor.kind) == ((16, 24), "image")
    assert predictor.predict([tmp_path / "files" / "a" / "0.png"])[0].notes == []
    assert evaluate(tmp_path / "run", device="cpu") == result["accuracy"]


def test_options_of_sequences_are_rejected():
    experiment = small(compose(["experiment=cifar-mrconvnext"]), tie_dropout=False, depth=3)
    with pytest.raises(ValueError, match=r"^depth, tie_dropout can only be used with sequences; cifar has images"):
        TaskData(experiment, images())
