"""MNIST in miniature."""

import gzip

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task

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


def write(folder, files, packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.gz" if packed else folder / name).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize(("packed", "inner"), [(False, "."), (True, "."), (False, "MNIST/raw"), (True, "smnist")])
def test_pixels_come_row_by_row_with_their_labels(tmp_path, packed, inner):
    files = contents()
    write(tmp_path / inner, files, packed)
    data = task("smnist", tmp_path).prepare()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 36, "val": 4, "test": 8}
    assert data.splits["test"].x.shape == (8, 784, 1)
    assert data.splits["test"].x.tobytes() == files["t10k-images-idx3-ubyte"][16:]
    numbers = [data.splits[name].x[:, 0, 0] for name in ("train", "val")]
    assert sorted(np.concatenate(numbers)) == list(range(40))
    assert all((data.splits[name].y == n % 10).all() for name, n in zip(("train", "val"), numbers, strict=True))
    assert 255 * data.scale + data.shift == pytest.approx(1)


def test_permuted_rows_have_all_pixels_in_one_other_order(tmp_path):
    write(tmp_path, contents())
    plain, permuted = (task("smnist", tmp_path, permuted=flag).prepare() for flag in (False, True))
    order = np.random.RandomState(92916).permutation(784)
    assert sorted(order) == list(range(784))
    assert order[:3].tolist() == [319, 576, 323]  # as ever: RandomState's numbers are frozen
    for name in plain.splits:
        assert (permuted.splits[name].x == plain.splits[name].x[:, order]).all()
        assert (permuted.splits[name].y == plain.splits[name].y).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NAMES[0], lambda c: c[:-1], r"train-images-idx3-ubyte has .* bytes; its header promises"),
        (NAMES[0], lambda c: b"", "begins with"),
        (NAMES[1], lambda c: b"\0\0\x08\x03" + c[4:], "begins with 00 00 08 03; expected 00 00 08 01"),
        (NAMES[2], lambda c: c[:8] + b"\0\0\0\x0e\0\0\0\x38" + c[16:], "images of 14 x 56; expected 28 x 28"),
        (NAMES[3], lambda c: c[:-1] + b"\x0a", "t10k-labels-idx1-ubyte: row 7 has label 10; expected 0 to 9"),
        (NAMES[3], lambda c: idx(np.zeros(7, np.uint8)), "has 8 images and .* 7 labels"),
    ],
)
def test_a_file_that_is_not_as_expected_is_named(tmp_path, name, change, message):
    files = contents()
    write(tmp_path, files | {name: change(files[name])})
    with pytest.raises(DataError, match=message):
        task("smnist", tmp_path).prepare()


def test_a_packed_file_that_is_cut_off_is_named(tmp_path):
    write(tmp_path, contents(), packed=True)
    path = tmp_path / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged or cut off"):
        task("smnist", tmp_path).prepare()


def test_a_missing_file_is_named(tmp_path):
    files = contents()
    del files[NAMES[3]]
    write(tmp_path, files)
    with pytest.raises(MissingData, match="none of t10k-labels-idx1-ubyte"):
        task("smnist", tmp_path).prepare()
