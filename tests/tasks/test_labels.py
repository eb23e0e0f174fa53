"""Labels of custom data by target: tables, JSON lines and arrays; errors name file, line and key."""

import json

import numpy as np
import pytest
import torch

from mrconv.tasks import DataError, ResidentLoader, data_loader
from mrconv.tasks.preview import describe_example, label_counts, summary
from mrconv.tasks.window_loader import IGNORED

from .data_files import write_files
from .test_custom import custom

X = np.random.default_rng(0).normal(size=(4, 3))


def prepared(folder, target, train, test, **options):
    """Return data of two tables or files of JSON lines."""
    end = "jsonl" if train.startswith("{") else "csv"
    write_files(folder, {f"train.{end}": train, f"test.{end}": test})
    return custom(folder, folder, target=target, **options).prepare()


def jsonl(*labels):
    return "".join(json.dumps({"text": "abc", "label": label}) + "\n" for label in labels)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("text,label\nab,red;big\nc,big\nd,\n", "text,label\ne, red \n"),
        (jsonl(["red", "big"], "big", []), jsonl("red")),
    ],
)
def test_sets_of_labels_become_zeros_and_ones(tmp_path, train, test):
    data = prepared(tmp_path, "labels", train, test)
    assert (data.target, data.metric, data.classes) == ("labels", "accuracy", ("big", "red"))
    np.testing.assert_array_equal(data.splits["train"].y, [[1, 1], [1, 0], [0, 0]])
    np.testing.assert_array_equal(data.splits["test"].y, [[0, 1]])
    assert label_counts(data, data.splits["train"]).tolist() == [2, 1]
    assert "train 0: big; red" in describe_example(data, data.splits["train"], 0)


def test_columns_of_zeros_and_ones_are_labels_even_if_one_is_never_set(tmp_path):
    y = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]])
    np.savez(tmp_path / "a.npz", x_train=X, y_train=y, x_test=X[:1], y_test=y[:1])
    data = custom(tmp_path, tmp_path / "a.npz", target="labels").prepare()
    assert data.classes == ("0", "1", "2")
    np.testing.assert_array_equal(data.splits["train"].y, y)


def test_values_come_from_one_or_several_columns(tmp_path):
    train, test = "mass,a,size,b\n1.5,1,10,2\n-2,3,1e2,4\n", "mass,a,size,b\n0,5,7,6\n"
    data = prepared(tmp_path, "values", train, test, label_column=["mass", "size"])
    assert (data.target, data.metric, data.classes, data.length) == ("values", "mae", ("mass", "size"), 2)
    np.testing.assert_array_equal(data.splits["train"].y, [[1.5, 10], [-2, 100]])
    np.testing.assert_array_equal(data.splits["train"].x[..., 0], [[1, 2], [3, 4]])
    assert "mass             mean -0.25, deviation 1.75, from -2 to 1.5" in summary(data)
    single = prepared(tmp_path, "values", train, test, label_column="mass")
    assert (single.classes, single.length) == (("mass",), 3)


@pytest.mark.parametrize(("labels", "names"), [((1, 2.5), ("label",)), (([1, 2], [3, 4]), ("label_0", "label_1"))])
def test_values_of_json_lines_are_numbers_or_lists(tmp_path, labels, names):
    data = prepared(tmp_path, "values", jsonl(*labels), jsonl(labels[0]))
    assert data.classes == names
    np.testing.assert_array_equal(data.splits["train"].y.reshape(len(labels), -1)[0], np.ravel(labels[0]))


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_values_of_arrays(tmp_path, shape):
    y = np.random.default_rng(0).normal(size=shape)
    np.savez(tmp_path / "a.npz", x_train=X, y_train=y, x_test=X, y_test=y)
    data = custom(tmp_path, tmp_path / "a.npz", target="values").prepare()
    assert data.classes == (("y",) if len(shape) == 1 else ("y_0", "y_1"))
    np.testing.assert_allclose(data.splits["test"].y.reshape(shape), y, rtol=1e-6)


@pytest.mark.parametrize("labels", [("NVN", "VN"), ("N V N", "V N"), (["N", "V", "N"], ["V", "N"])])
def test_classes_of_positions_are_words_characters_or_lists(tmp_path, labels):
    lines = [
        json.dumps({"text": text, "label": label}) + "\n" for text, label in zip(("abc", "de"), labels, strict=True)
    ]
    data = prepared(tmp_path, "positions", "".join(lines), lines[0])
    assert (data.target, data.classes, data.length) == ("positions", ("N", "V"), 4)  # with <eos>, which has no class
    np.testing.assert_array_equal(data.splits["train"].y, [[0, 1, 0, IGNORED], [1, 0, IGNORED, IGNORED]])
    assert label_counts(data, data.splits["train"]).tolist() == [3, 2]


def test_negative_integers_of_arrays_are_positions_without_a_label(tmp_path):
    y = np.array([[0, 1, -1], [1, 1, 0], [0, -100, 0], [1, 0, 1]])
    np.savez(tmp_path / "a.npz", x_train=X, y_train=y, x_test=X, y_test=y)
    data = custom(tmp_path, tmp_path / "a.npz", target="positions", length=5).prepare()
    np.testing.assert_array_equal(data.splits["train"].y[:, :3], np.where(y < 0, IGNORED, y))
    assert (np.asarray(data.splits["train"].y)[:, 3:] == IGNORED).all()
    half = data.decimated(0.5)
    assert (half.splits["train"].y.shape, half.splits["train"].x.shape[:2]) == ((4, 3), (4, 2))
    (batch,) = data_loader(half, "train", 4)
    assert batch.y.shape == batch.x.shape[:2]


@pytest.mark.parametrize(
    "loader", [data_loader, lambda *args, **options: ResidentLoader(*args, device="cpu", **options)]
)
def test_batches_have_a_label_for_each_padded_position(tmp_path, loader):
    lines = "".join(f"{'ab' * n},{'xy' * n}\n" for n in (1, 2, 3, 4))
    data = prepared(tmp_path, "positions", f"text,label\n{lines}", f"text,label\n{lines}")
    for batch in loader(data, "train", 2, bucket=True):
        assert batch.x.shape == batch.y.shape
        valid = torch.arange(batch.x.shape[1]) < batch.lengths[:, None] - 1  # <eos> has no label
        torch.testing.assert_close(batch.y != IGNORED, valid)


@pytest.mark.parametrize(
    ("target", "train", "message"),
    [
        ("class", jsonl("a", 1.5), r"train\.jsonl, line 2: label is 1.5; expected a name .* set target=values"),
        ("labels", jsonl(["a"], ["b", 1.5]), r"train\.jsonl, line 2: label is \['b', 1.5\]; expected names separated"),
        ("labels", jsonl([], []), "no example has a label"),
        ("values", "text,label\na,1\nb,many\n", r"train\.csv, line 3: label is 'many'; expected a finite number"),
        ("values", "text,label\na,1\nb,inf\n", r"train\.csv, line 3: label is 'inf'; expected a finite number"),
        ("values", jsonl(1, True), r"train\.jsonl, line 2: label is True; expected a finite number"),
        ("values", jsonl([1, 2], [1]), r"train\.jsonl, example 2: 1 values; expected 2"),
        (
            "positions",
            jsonl("xyx", "xy"),
            r"train\.jsonl, example 2: 2 labels of 3 positions; expected a label for each",
        ),
        ("positions", jsonl("xyx", 3), r"train\.jsonl, line 2: label is 3; expected a class per position"),
    ],
)
def test_wrong_labels_are_named(tmp_path, target, train, message):
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, target, train, train)


@pytest.mark.parametrize(
    ("target", "y", "message"),
    [
        ("class", np.ones((4, 3), int), r"y is int64 of shape \(4, 3\) .* target=labels, .* target=positions"),
        (
            "labels",
            np.full((4, 2), 0.5),
            r"y is float64 of shape \(4, 2\) for 4 examples .* expected 0 and 1 \(n, labels",
        ),
        ("values", np.full(4, np.nan), r"a\.npz, y is float64 .* expected finite numbers"),
        ("positions", np.ones((4, 2), int), r"y is int64 of shape \(4, 2\) .* length 3; expected .* \(n, length\)"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, target, y, message):
    np.savez(tmp_path / "a.npz", x=X, y=y)
    with pytest.raises(DataError, match=message):
        custom(tmp_path, tmp_path / "a.npz", target=target).prepare()


def test_missing_columns_of_values_are_named(tmp_path):
    with pytest.raises(DataError, match=r"columns a, b, c; expected b, d and others"):
        prepared(tmp_path, "values", "a,b,c\n1,2,3\n", "a,b,c\n1,2,3\n", label_column="b,d")


def test_the_default_target_keeps_the_folders_of_older_caches(tmp_path):
    assert "target" not in custom(tmp_path, tmp_path / "a.csv").options()
    assert custom(tmp_path, tmp_path / "a.csv", target="values").options()["target"] == "values"
    with pytest.raises(ValueError, match="target must be one of"):
        custom(tmp_path, tmp_path / "a.csv", target="regression").prepare()
