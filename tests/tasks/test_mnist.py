"""Sequential MNIST in miniature."""

import gzip

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task

from .data_files import truncate, write_files

NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def contents():
    draw = np.random.default_rng(0)
    arrays = []
    for n in (40, 8):
        images = draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        images[:, 0, 0] = np.arange(n)
        arrays += [images, (np.arange(n) % 10).astype(np.uint8)]
    return dict(zip(NAMES, map(idx, arrays), strict=True))


def write(folder, files, compressed=False):
    write_files(folder, {f"{n}.gz": gzip.compress(c) for n, c in files.items()} if compressed else files)


@pytest.mark.parametrize(("compressed", "inner"), [(False, "."), (True, "."), (False, "MNIST/raw"), (True, "smnist")])
def test_pixels_are_in_raster_order_with_their_labels(tmp_path, compressed, inner):
    files = contents()
    write(tmp_path / inner, files, compressed)
    data = task("smnist", tmp_path).prepare()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 36, "val": 4, "test": 8}
    assert data.splits["test"].x.shape == (8, 784, 1)
    assert data.splits["test"].x.tobytes() == files["t10k-images-idx3-ubyte"][16:]
    numbers = [data.splits[name].x[:, 0, 0] for name in ("train", "val")]
    assert sorted(np.concatenate(numbers)) == list(range(40))
    assert all((data.splits[name].y == n % 10).all() for name, n in zip(("train", "val"), numbers, strict=True))
    assert 255 * data.scale + data.shift == pytest.approx(1)


def test_permutation_of_the_pixels_is_fixed(tmp_path):
    write(tmp_path, contents())
    original, permuted = (task("smnist", tmp_path, permuted=flag).prepare() for flag in (False, True))
    order = np.random.RandomState(92916).permutation(784)
    assert sorted(order) == list(range(784))
    assert order[:3].tolist() == [319, 576, 323]  # RandomState's stream is frozen
    for name in original.splits:
        assert (permuted.splits[name].x == original.splits[name].x[:, order]).all()
        assert (permuted.splits[name].y == original.splits[name].y).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NAMES[0], lambda c: c[:-1], r"train-images-idx3-ubyte has .* bytes; expected .* by its header"),
        (NAMES[0], lambda c: b"", "begins with"),
        (NAMES[1], lambda c: b"\0\0\x08\x03" + c[4:], "begins with 00 00 08 03; expected 00 00 08 01"),
        (NAMES[2], lambda c: c[:8] + b"\0\0\0\x0e\0\0\0\x38" + c[16:], "images of 14 x 56; expected 28 x 28"),
        (NAMES[3], lambda c: c[:-1] + b"\x0a", "t10k-labels-idx1-ubyte: image 7 has label 10; expected 0 to 9"),
        (NAMES[3], lambda c: idx(np.zeros(7, np.uint8)), "has 8 images and .* 7 labels"),
    ],
)
def test_invalid_file_raises(tmp_path, name, change, message):
    files = contents()
    write(tmp_path, files | {name: change(files[name])})
    with pytest.raises(DataError, match=message):
        task("smnist", tmp_path).prepare()


def test_truncated_file_raises(tmp_path):
    write(tmp_path, contents(), compressed=True)
    truncate(tmp_path / f"{NAMES[0]}.gz", -100)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged or truncated"):
        task("smnist", tmp_path).prepare()


def test_missing_file_raises(tmp_path):
    files = contents()
    del files[NAMES[3]]
    write(tmp_path, files)
    with pytest.raises(MissingData, match="none of t10k-labels-idx1-ubyte"):
        task("smnist", tmp_path).prepare()
