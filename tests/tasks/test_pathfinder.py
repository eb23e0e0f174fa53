"""Pathfinder: Long Range Arena's files, and generated images."""

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task

from .data_files import write_pathfinder

pillow = pytest.importorskip("PIL.Image")
N, SIZE = 40, 8


def images(n=N, size=SIZE):
    """Return n images and labels; the first pixel of each image is its number."""
    x = np.random.default_rng(0).integers(0, 256, (n, size, size), dtype=np.uint8)
    x[:, 0, 0] = np.arange(n)
    return x, np.arange(n) % 3 == 0


@pytest.mark.parametrize("inner", [".", "lra_release/lra_release", "pathfinder"])
def test_files_in_the_layout_of_lra_are_read(tmp_path, inner):
    x, y = images()
    write_pathfinder(tmp_path / inner, x, y, per_folder=15)
    data = task("pathfinder", tmp_path, size=SIZE, source="files").prepare()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 32, "val": 4, "test": 4}
    seen = []
    for split in data.splits.values():
        number = np.asarray(split.x[:, 0, 0], np.int64)
        assert (split.x == x[number].reshape(-1, SIZE * SIZE, 1)).all()
        assert (split.y == y[number]).all()
        seen += number.tolist()
    assert sorted(seen) == list(range(N))
    assert data.length == SIZE * SIZE
    assert data.facts["source"] == "files"


def test_metadata_is_read_in_numerical_order(tmp_path):
    x, y = images()
    a, b = tmp_path / "a", tmp_path / "b"
    write_pathfinder(a, x, y, per_folder=3)  # 0.npy ... 13.npy: by name, 10.npy would come before 2.npy
    write_pathfinder(b, x, y, per_folder=N)
    first, second = (task("pathfinder", root, size=SIZE).prepare() for root in (a, b))
    for name in first.splits:
        assert (first.splits[name].x == second.splits[name].x).all()


@pytest.mark.parametrize("flat", [False, True])
def test_metadata_may_be_an_array_of_strings(tmp_path, flat):
    x, y = images()
    folder = write_pathfinder(tmp_path, x, y)
    from_text = task("pathfinder", tmp_path, size=SIZE).prepare()
    path = folder / "metadata" / "0.npy"
    lines = path.read_text().splitlines()
    np.save(path, np.array(lines if flat else [line.split() for line in lines]))
    from_array = task("pathfinder", tmp_path, size=SIZE).prepare()
    assert from_array.folder != from_text.folder
    assert all((from_array.splits[name].x == from_text.splits[name].x).all() for name in from_text.splits)


@pytest.mark.parametrize(("centre", "ends"), [(True, (-1, 1)), (False, (0, 1))])
def test_centred_and_uncentred_values(tmp_path, centre, ends):
    write_pathfinder(tmp_path, *images())
    data = task("pathfinder", tmp_path, size=SIZE, centre=centre).prepare()
    assert (data.shift, 255 * data.scale + data.shift) == pytest.approx(ends)


def change_image(content):
    return lambda folder: (folder / "imgs/0/sample_7.png").write_bytes(content)


def change_line(line):
    def change(folder):
        path = folder / "metadata" / "0.npy"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:7], line, *lines[8:]]))

    return change


def small(folder):
    pillow.fromarray(np.zeros((SIZE, SIZE - 1), np.uint8)).save(folder / "imgs/0/sample_7.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_image(b""), r"sample_7\.png is empty"),
        (change_image(b"\x89PNG\r\n\x1a\n" + bytes(40)), r"sample_7\.png cannot be read"),
        (small, r"sample_7\.png has 7 x 8 pixels; expected 8 x 8"),
        (lambda folder: (folder / "imgs/0/sample_7.png").unlink(), r"sample_7\.png does not exist"),
        (change_line("imgs/0 sample_7.png 7"), r"0\.npy line 8: expected folder, file, number and label"),
        (change_line("imgs/0 sample_7.png 7 2"), r"0\.npy line 8"),
        (change_line("../.. x.png 7 1"), r"0\.npy line 8: .* is outside"),
        (lambda folder: (folder / "metadata/0.npy").write_bytes(b"\xff\xfe\x00"), "neither text nor"),
        (lambda folder: (folder / "metadata/0.npy").write_bytes(b"\x93NUMPY\x01\x00"), "not an array of numbers or"),
        (lambda folder: np.save(folder / "metadata/0.npy", np.zeros(3)), "neither text nor"),
        (lambda folder: (folder / "metadata/0.npy").rename(folder / "metadata/x.npy"), "expected a number as the name"),
        (lambda folder: (folder / "metadata/0.npy").unlink(), r"metadata has no \.npy file"),
        (lambda folder: (folder / "metadata/0.npy").write_text(""), "lists 0 images"),
    ],
)
def test_invalid_files_raise(tmp_path, change, message):
    folder = write_pathfinder(tmp_path, *images())
    change(folder)
    with pytest.raises(DataError, match=message):
        task("pathfinder", tmp_path, size=SIZE).prepare()


def test_missing_files_raise_with_source_files(tmp_path):
    with pytest.raises(MissingData, match=r"pathfinder128/curv_contour_length_14.*source='generate'"):
        task("pathx", tmp_path, source="files").prepare()


def test_images_are_generated_without_files(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    from mrconv.tasks import pathfinder
    from mrconv.tasks.generators.pathfinder_images import generate

    calls = []
    data = task("pathfinder", tmp_path, count=30, seed=5).prepare(lambda done, total: calls.append((done, total)))
    assert data.facts["source"] == "generated"
    assert calls[-1] == (30, 30)
    assert {name: split.x.shape for name, split in data.splits.items()} == {
        "train": (24, 1024, 1),
        "val": (3, 1024, 1),
        "test": (3, 1024, 1),
    }
    generated = generate(30, 32, seed=5)
    expected = {image.tobytes(): label for image, label in zip(generated.images, generated.labels, strict=True)}
    actual = {image.tobytes(): y for s in data.splits.values() for image, y in zip(s.x, s.y, strict=True)}
    assert actual == expected

    monkeypatch.setattr(pathfinder, "CHUNK", 7)
    again = task("pathfinder", tmp_path, count=30, seed=5, source="generate").prepare()
    assert all((again.splits[name].x == data.splits[name].x).all() for name in data.splits)
