"""CIFAR-10 in miniature, as archive and as folder."""

import pickle
import sys

import numpy as np
import pytest
import torch

from mrconv.tasks import DataError, MissingData, data_loader, preview, task

from .data_files import truncate, write_files, write_tar

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
IMAGES = 8


def contents(images=IMAGES):
    """Return the seven files; the first pixel of training image i is (i, i + 1, i + 2)."""
    files = {}
    for b, name in enumerate(FILES):
        data = np.random.default_rng(b).integers(0, 256, (images, 3, 1024), dtype=np.uint8)
        data[:, :, 0] = (b * images + np.arange(images))[:, None] + np.arange(3)
        batch = {"data": data.reshape(images, 3072), "labels": [(b * images + i) % 10 for i in range(images)]}
        files[name] = pickle.dumps(batch, protocol=4)
    files["batches.meta"] = pickle.dumps({"label_names": NAMES}, protocol=2)
    return files


def as_folder(root, files):
    write_files(root / "cifar-10-batches-py", files)
    return root


def as_archive(root, files):
    members = {f"cifar-10-batches-py/{name}": content for name, content in files.items()}
    write_tar(root / "cifar-10-python.tar.gz", members)
    return root


@pytest.mark.parametrize("write", [as_folder, as_archive])
def test_colour_pixels_are_in_raster_order(tmp_path, write):
    files = contents()
    data = task("scifar", write(tmp_path, files)).prepare()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 36, "val": 4, "test": 8}
    planes = pickle.loads(files["test_batch"])["data"].reshape(IMAGES, 3, 32, 32)
    test = data.splits["test"].x
    assert test.dtype == np.uint8
    assert test.shape == (IMAGES, 1024, 3)
    assert (test.reshape(IMAGES, 32, 32, 3) == planes.transpose(0, 2, 3, 1)).all()
    assert data.classes == tuple(NAMES)
    assert data.channels == 3
    assert data.length == 1024
    assert not data.facts["original"]


def test_training_and_validation_partition_the_training_images(tmp_path):
    data = task("scifar", as_folder(tmp_path, contents())).prepare()
    numbers = {name: np.asarray(data.splits[name].x[:, 0, 0], np.int64) for name in ("train", "val")}
    assert sorted(np.concatenate([numbers["train"], numbers["val"]])) == list(range(40))
    for name, number in numbers.items():
        assert (data.splits[name].y == number % 10).all()


def test_each_colour_is_normalised_by_its_mean_and_deviation(tmp_path):
    data = task("scifar", as_folder(tmp_path, contents())).prepare()
    assert data.scale.shape == data.shift.shape == (1, 3)
    x = np.array([[0.4914, 0.4822, 0.4465], [0.4914 + 0.247, 0.4822 + 0.243, 0.4465 + 0.261]]) * 255
    np.testing.assert_allclose(x * data.scale + data.shift, [[0, 0, 0], [1, 1, 1]], atol=1e-6)


def test_greyscale_equals_pillow(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    files = contents()
    data = task("image", as_folder(tmp_path, files)).prepare()
    planes = pickle.loads(files["test_batch"])["data"].reshape(IMAGES, 3, 32, 32)
    for pixels, image in zip(data.splits["test"].x, planes, strict=True):
        grey = pillow.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).convert("L")
        assert (pixels.reshape(32, 32) == np.asarray(grey)).all()
    assert data.channels == 1
    assert 122.6 * data.scale + data.shift == pytest.approx(0)
    assert 183.6 * data.scale + data.shift == pytest.approx(1)


def test_batches_pickled_by_python_2_are_read(tmp_path):
    files = contents()
    head, tail = (
        b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\n",
        b"U\x06labelsq\x02]q\x03(K\x01K\x02eu.",
    )
    pixels = bytes(2 * 3072)
    files["test_batch"] = (
        head
        + b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tb"
        + tail
    )
    test = task("scifar", as_folder(tmp_path, files)).prepare().splits["test"]
    assert test.x.shape == (2, 1024, 3)
    assert not test.x.any()
    assert test.y.tolist() == [1, 2]


def test_pickle_that_would_run_code_raises(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run!",))

    files = contents() | {"data_batch_3": pickle.dumps({"data": Evil()})}
    with pytest.raises(DataError, match=r"data_batch_3 needs 'builtins\.print'.*do not trust this file"):
        task("image", as_folder(tmp_path, files)).prepare()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": np.zeros((IMAGES, 3071), np.uint8)},
            r"data_batch_2: 'data' must be uint8 of shape \(n, 3072\).*3071",
        ),
        ({"data": np.zeros((IMAGES, 3072), np.int64)}, "got i8 of shape"),
        ({"data": None}, "got NoneType"),
        ({"labels": [0] * (IMAGES - 1)}, f"'labels' must be a list of {IMAGES}"),
        ({"labels": [0] * (IMAGES - 1) + [10]}, f"image {IMAGES - 1} has label 10; expected 0 to 9"),
    ],
)
def test_invalid_batch_raises(tmp_path, change, message):
    batch = pickle.loads(contents()["data_batch_2"]) | change
    files = contents() | {"data_batch_2": pickle.dumps(batch, protocol=4)}
    with pytest.raises(DataError, match=message):
        task("image", as_folder(tmp_path, files)).prepare()


@pytest.mark.parametrize("content", [b"", b"junk", contents()["data_batch_1"][:1000], pickle.dumps([1, 2])])
def test_damaged_batch_raises(tmp_path, content):
    with pytest.raises(DataError, match="data_batch_1"):
        task("image", as_folder(tmp_path, contents() | {"data_batch_1": content})).prepare()


def test_full_batch_with_another_checksum_raises(tmp_path):
    full = pickle.dumps({"data": np.zeros((10_000, 3072), np.uint8), "labels": [0] * 10_000}, protocol=4)
    with pytest.raises(DataError, match=r"data_batch_4 is not the original: its MD5 is .*; expected 634d18"):
        task("image", as_folder(tmp_path, contents() | {"data_batch_4": full})).prepare()


def test_invalid_class_names_raise(tmp_path):
    files = contents() | {"batches.meta": pickle.dumps({"label_names": NAMES[:9]}, protocol=2)}
    with pytest.raises(DataError, match=r"batches\.meta: 'label_names' must be a list of ten"):
        task("image", as_folder(tmp_path, files)).prepare()


def test_missing_files_raise(tmp_path):
    with pytest.raises(MissingData, match=r"cifar-10-python\.tar\.gz.*cs\.toronto\.edu"):
        task("image", tmp_path).prepare()
    files = contents()
    del files["data_batch_5"]
    with pytest.raises(DataError, match="has no data_batch_5"):
        task("image", as_folder(tmp_path, files)).prepare()


def test_truncated_archive_raises_and_leaves_no_cache(tmp_path):
    archive = as_archive(tmp_path, contents()) / "cifar-10-python.tar.gz"
    truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(DataError, match="truncated"):
        task("image", tmp_path).prepare()
    assert not list((tmp_path / "cache").glob("*"))


def test_images_equal_sequential_cifar_reshaped(tmp_path, monkeypatch):
    folder = as_folder(tmp_path, contents())
    images, flat = (task(name, folder).prepare() for name in ("cifar", "scifar"))
    assert images.encoder == "image"
    assert images.facts["size"] == 32
    assert np.array_equal(images.splits["train"].x.reshape(flat.splits["train"].x.shape), flat.splits["train"].x)
    batch, other = (next(iter(data_loader(data, "val", 2))).x for data in (images, flat))
    assert batch.shape == (2, 3, 32, 32)
    assert torch.equal(batch.flatten(2).transpose(1, 2), other)
    plain = preview.describe_example(images, images.splits["test"], 0)
    assert "\x1b" not in plain
    assert [len(line) for line in plain.splitlines()[1:]] == [32] * 16
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[38;5;" in preview.describe_example(images, images.splits["test"], 0)
