"""Splits of custom data that are drawn: at random, from each class, and by groups."""

import json

import numpy as np
import pytest

from mrconv.tasks import DataError, task
from mrconv.tasks.input_files import read_inputs
from mrconv.tasks.preprocessing import Preprocessor

from .data_files import write_files
from .test_custom import wav

N = 60
RARE = np.array(["rare" if i % 15 == 0 else "common" for i in range(N)])  # 4 of 60
GROUPS = np.array([f"s{i % 10}" for i in range(N)])


def prepared(tmp_path, path, **options):
    return task("folder", tmp_path / "data", path=str(path), **options).prepare()


def examples_by_split(data):
    """Return the first value of each example, which is its number, by split."""
    return {name: [int(split.example(i)[0, 0]) for i in range(len(split))] for name, split in data.splits.items()}


def write_table(path, with_group=True):
    lines = [f"{i},{i % 7}," + (f"{GROUPS[i]}," if with_group else "") + RARE[i] for i in range(N)]
    path.write_text("\n".join(["a,b," + ("speaker," if with_group else "") + "label", *lines]))
    return path


def test_stratified_splits_have_every_class_in_its_proportion(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.arange(N)[:, None] + [0.0, 0.5], y=RARE)
    data = prepared(tmp_path, tmp_path / "d.npz", stratify=True)
    found = examples_by_split(data)
    assert sorted(i for part in found.values() for i in part) == list(range(N))
    counts = {split: [(RARE[part] == name).sum() for name in ("rare", "common")] for split, part in found.items()}
    assert counts == {"train": [2, 44], "val": [1, 6], "test": [1, 6]}
    again = prepared(tmp_path, tmp_path / "d.npz", stratify=True, seed=1)
    assert examples_by_split(again) != found


def test_a_class_too_small_to_stratify_is_named(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.ones((N, 2)), y=[2 if i < 2 else i % 2 for i in range(N)])
    with pytest.raises(DataError, match="class 2 has 2 examples; stratify needs at least one for each of the 3 splits"):
        prepared(tmp_path, tmp_path / "d.npz", stratify=True)
    assert set(prepared(tmp_path, tmp_path / "d.npz", stratify=True, test_fraction=0).splits) == {"train", "val"}


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_examples_of_a_group_are_in_one_split(tmp_path, kind):
    path = tmp_path / f"d.{kind}"
    if kind == "csv":
        write_table(path)
    else:
        np.savez(path, x=np.stack([np.arange(N), np.arange(N) % 7], 1).astype(float), y=RARE, speaker=GROUPS)
    data = prepared(tmp_path, path, group="speaker", val_fraction=0.2, test_fraction=0.3)
    assert data.length == 2  # the column of groups is no input
    found = {split: set(GROUPS[part]) for split, part in examples_by_split(data).items()}
    assert {split: len(groups) for split, groups in found.items()} == {"train": 5, "val": 2, "test": 3}
    assert set.union(*found.values()) == set(GROUPS)
    assert sum(map(len, data.splits.values())) == N


def test_groups_of_json_lines(tmp_path):
    lines = [json.dumps({"text": "a" * (1 + i % 10), "label": RARE[i], "speaker": i % 10}) for i in range(N)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data = prepared(tmp_path, tmp_path / "d.jsonl", group="speaker")
    found = [set(split.lengths) for split in data.splits.values()]
    assert [len(lengths) for lengths in found] == [8, 1, 1]
    assert len(set.union(*found)) == 10


def test_groups_of_recordings_follow_from_their_names(tmp_path):
    names = {f"{'ab'[i % 2]}/singer{i % 5}_{i}.wav": wav(np.full(8, i)) for i in range(30)}
    write_files(tmp_path / "files", names)
    options = {"val_fraction": 0.2, "test_fraction": 0.2}
    data = prepared(tmp_path, tmp_path / "files", group=r"singer(\d+)_", **options)
    found = [{i % 5 for i in part} for part in examples_by_split(data).values()]
    assert [len(singers) for singers in found] == [3, 1, 1]
    assert len(set.union(*found)) == 5
    for group, message in (("singer9", "a/singer0_0.wav: the regular expression group=singer9 does not match"),
                           ("(", "is not a regular expression")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            prepared(tmp_path, tmp_path / "files", group=group)


def test_tables_of_a_prediction_may_have_the_column_of_groups_or_not(tmp_path):
    data = prepared(tmp_path, write_table(tmp_path / "d.csv"), group="speaker")
    preprocessor = Preprocessor.from_json(Preprocessor.from_data(data).to_json())
    for path in (tmp_path / "d.csv", write_table(tmp_path / "without.csv", with_group=False)):
        first = next(read_inputs(path, preprocessor))
        assert first.raw.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "singer"}, "has columns a, b, speaker, label; expected singer, the column of task.group"),
        ({"group": "speaker", "val_fraction": 0.05}, "has 10 groups: too few for val with val_fraction=0.05"),
        ({"group": "speaker", "stratify": True}, "cannot be combined with group=speaker"),
        ({"stratify": True, "target": "values"}, "cannot be combined with target=values"),
    ],
)
def test_splits_that_cannot_be_drawn_raise(tmp_path, options, message):
    with pytest.raises((ValueError, DataError), match=message):
        prepared(tmp_path, write_table(tmp_path / "d.csv"), **options)


def test_options_of_drawn_splits_raise_if_splits_are_given(tmp_path):
    for split in ("train", "test"):
        write_table(tmp_path / f"{split}.csv")
    with pytest.raises(DataError, match=r"has the splits train, test: leave out task\.stratify and task\.group"):
        prepared(tmp_path, tmp_path, group="speaker")


def test_missing_array_of_groups_is_named(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.ones((N, 2)), y=RARE)
    with pytest.raises(DataError, match=r"has x, y; expected speaker, the groups, of shape \(60,\)"):
        prepared(tmp_path, tmp_path / "d.npz", group="speaker")


def test_defaults_keep_the_caches_of_earlier_versions():
    assert not {"stratify", "group"} & set(task("folder", "data", path="x").options())
