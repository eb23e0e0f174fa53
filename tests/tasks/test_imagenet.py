"""Images in class folders: the index and the decoded images."""

import os
import re
import resource

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mrconv.tasks import DataError, MissingData, data_loader, task
from mrconv.tasks.imagenet import MEAN, STD, ImageFiles, centre_crop, random_resized_crop

pillow = pytest.importorskip("PIL.Image")


def random_image(seed, width=48, height=40):
    """Return a smooth random image."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return pillow.fromarray(small).resize((width, height), pillow.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    for s, split in enumerate(("train", "val")):
        for c, name in enumerate(("n02", "n01")):
            (tmp_path / "imagenet" / split / name).mkdir(parents=True)
            for i in range(3):
                random_image(100 * s + 10 * c + i).save(tmp_path / "imagenet" / split / name / f"{i}.JPEG")
    return tmp_path


def test_index_has_paths_and_labels_sorted_by_name(folder):
    data = task("imagenet", folder).prepare()
    assert data.encoder == "image"
    assert data.classes == ("n01", "n02")
    assert data.length == 224 * 224
    assert data.splits["train"].x[:4].tolist() == [
        b"train/n01/0.JPEG",
        b"train/n01/1.JPEG",
        b"train/n01/2.JPEG",
        b"train/n02/0.JPEG",
    ]
    assert data.splits["val"].y.tolist() == [0, 0, 0, 1, 1, 1]


def test_index_is_rebuilt_when_an_image_is_added(folder):
    before = task("imagenet", folder).prepare()
    random_image(5).save(folder / "imagenet" / "train" / "n01" / "9.png")
    after = task("imagenet", folder).prepare()
    assert (len(before.splits["train"]), len(after.splits["train"])) == (6, 7)


def test_evaluation_uses_the_normalised_centre_crop(folder):
    files = ImageFiles(task("imagenet", folder, size=28).prepare(), "val")
    x, y = files[4]
    assert x.shape == (3, 28, 28)
    assert x.dtype == torch.float32
    assert y == 1
    image = pillow.open(folder / "imagenet/val/n02/1.JPEG").resize((38, 32), pillow.Resampling.BICUBIC)
    expected = np.asarray(image.crop((5, 2, 33, 30))) / 255
    expected = (expected - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(x.permute(1, 2, 0), expected, atol=1e-6)


def test_training_crops_depend_on_seed_epoch_and_index_alone(folder):
    data = task("imagenet", folder, size=16).prepare()

    def first(seed=0, epoch=0, index=2):
        files = ImageFiles(data, "train", seed=seed)
        files.set_epoch(epoch)
        return files[index][0]

    assert torch.equal(first(), first())
    assert not torch.equal(first(), first(epoch=1))
    assert not torch.equal(first(), first(seed=1))
    assert first().shape == (3, 16, 16)


def test_persistent_workers_see_the_epoch_change(folder):
    files = ImageFiles(task("imagenet", folder, size=16).prepare(), "train")
    loader = DataLoader(files, batch_size=6, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        files.set_epoch(epoch)
        ((x, _),) = loader
        assert torch.equal(x, torch.stack([files[i][0] for i in range(6)]))


def test_images_may_have_moved(folder, tmp_path):
    data = task("imagenet", folder, size=16).prepare()
    expected = ImageFiles(data, "val")[0][0]
    (folder / "imagenet").rename(tmp_path / "elsewhere")
    assert torch.equal(ImageFiles(data, "val", root=tmp_path / "elsewhere")[0][0], expected)
    with pytest.raises(DataError, match=r"imagenet/val/n01/0\.JPEG does not exist"):
        ImageFiles(data, "val")[0]


class Fixed:
    """A random generator that returns the given numbers."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def uniform(self, low, high):
        return low + (high - low) * self.random()

    def random(self):
        return self.numbers.pop(0)


def test_random_crops_have_the_drawn_size_position_and_flip():
    image = random_image(0, 60, 40)
    crop = random_resized_crop(image, 16, Fixed(0.25, 0.5, 0.999, 0.0, 0.7))  # 31 % of the area, square, top right
    side = round((60 * 40 * (0.08 + 0.92 * 0.25)) ** 0.5)
    expected = image.crop((60 - side, 0, 60, side)).resize((16, 16), pillow.Resampling.BICUBIC)
    assert crop.tobytes() == expected.tobytes()
    flipped = random_resized_crop(image, 16, Fixed(0.25, 0.5, 0.999, 0.0, 0.3))
    assert (np.asarray(flipped)[:, ::-1] == np.asarray(crop)).all()


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 50), (500, 3), (8, 8)])
def test_crops_of_images_of_odd_sizes(width, height):
    import random

    image = random_image(0, width, height)
    for seed in range(20):
        assert random_resized_crop(image, 16, random.Random(seed)).size == (16, 16)
    assert centre_crop(image, 16).size == (16, 16)


@pytest.mark.parametrize("mode", ["L", "CMYK", "P"])
def test_images_in_other_modes_become_rgb(folder, mode):
    random_image(0).convert(mode).save(folder / "imagenet/val/n01/0.JPEG", format="PNG" if mode == "P" else "JPEG")
    assert ImageFiles(task("imagenet", folder, size=16).prepare(), "val")[0][0].shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"junk", "cannot be read"), (None, "cannot be read")]
)
def test_damaged_image_raises_with_its_path(folder, content, message):
    path = folder / "imagenet/train/n01/1.JPEG"
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    files = ImageFiles(task("imagenet", folder, size=16).prepare(), "train")
    with pytest.raises(DataError, match=rf"train/n01/1\.JPEG {message}"):
        files[1]


def test_a_very_elongated_image_is_cropped_before_it_is_resized():
    image = pillow.new("RGB", (20_000, 2))
    image.putpixel((10_000, 0), (255, 255, 255))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crop = centre_crop(image, 224)
    assert crop.size == (224, 224)
    assert np.asarray(crop).max() > 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


def test_an_error_of_a_worker_is_one_line(folder):
    data = task("imagenet", folder, size=8).prepare()
    (folder / "imagenet/val/n01/1.JPEG").write_bytes(b"junk")
    with pytest.raises(DataError) as error:
        list(data_loader(data, "val", 2, workers=1))
    assert re.fullmatch(r".*val/n01/1\.JPEG cannot be read \(cannot identify image file .*\)", str(error.value))


def test_a_killed_worker_is_reported_in_one_line(folder, monkeypatch):
    data = task("imagenet", folder, size=8).prepare()
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda *_: os._exit(9))
    with pytest.raises(DataError, match=r"^DataLoader worker \(pid.*\) exited unexpectedly.*: .* workers=0$"):
        list(data_loader(data, "val", 2, workers=1))


def test_invalid_folders_raise(folder):
    root = folder / "imagenet"
    (root / "val" / "n03").mkdir()
    with pytest.raises(DataError, match="differ in 1 class folders, among them n03"):
        task("imagenet", folder).prepare()
    (root / "train" / "n03").mkdir()
    with pytest.raises(DataError, match=r"train/n03 has no image"):
        task("imagenet", folder).prepare()
    (root / "val").rename(root / "validation")
    with pytest.raises(MissingData, match=r"imagenet/val does not"):
        task("imagenet", folder).prepare()
    (root / "val").mkdir()
    random_image(0).save(root / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(DataError, match="val has no folders"):
        task("imagenet", folder).prepare()


def test_missing_folders_raise(tmp_path):
    with pytest.raises(MissingData, match=r"train/<class>/\*\.JPEG"):
        task("imagenet", tmp_path).prepare()


def test_unknown_split_raises(folder):
    with pytest.raises(ValueError, match="has no split 'test'; its splits are train, val"):
        ImageFiles(task("imagenet", folder).prepare(), "test")
