"""The cache of prepared data: atomic writes and keys."""

import json
import multiprocessing
import os

import numpy as np
import pytest

from mrconv.tasks import DataError, cache, task

from .data_files import truncate


def built():
    return {"train": {"x": np.arange(6).reshape(3, 2), "y": np.arange(3)}}, {"length": 2}


def test_arrays_are_loaded_as_memory_maps(tmp_path):
    folder = cache.build_once(tmp_path / "task-1", built)
    splits, metadata = cache.load_arrays(folder)
    assert metadata == {"length": 2}
    assert isinstance(splits["train"]["x"], np.memmap)
    assert splits["train"]["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_arrays_are_built_once(tmp_path):
    cache.build_once(tmp_path / "task-1", built)
    cache.build_once(tmp_path / "task-1", lambda: pytest.fail("built again"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_build_leaves_no_files(tmp_path, error):
    def broken():
        raise error

    with pytest.raises(error):
        cache.build_once(tmp_path / "task-1", broken)
    assert list(tmp_path.iterdir()) == []


def test_killed_build_leaves_no_complete_folder(tmp_path):
    def killed():
        def build():
            os._exit(9)

        cache.build_once(tmp_path / "task-1", build)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not (tmp_path / "task-1").exists()
    assert cache.load_arrays(cache.build_once(tmp_path / "task-1", built))[1] == {"length": 2}


def test_drafts_of_killed_processes_are_removed_and_those_of_others_kept(tmp_path):
    folder, other = tmp_path / f"task-{'0' * 12}", tmp_path / f"task-{'1' * 12}"

    def killed():
        with cache.drafted(folder):
            os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    with cache.drafted(other) as living:
        assert not left.exists()
        cache.build_once(folder, built)
        assert living.exists()
        (living / "meta.json").write_text("{}")
    assert sorted(tmp_path.iterdir()) == [folder, other]


def test_files_are_on_the_disk_before_a_folder_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda *paths: events.append("rename") or rename(*paths))
    cache.build_once(tmp_path / "task-1", built)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    draft = os.path.dirname(before[0])
    assert {os.path.basename(path) for path in before[:-1]} == {"train.x.npy", "train.y.npy", "meta.json"}
    assert before[-1] == draft
    assert after == [str(tmp_path)]


@pytest.mark.parametrize("name", ["train.x.npy", "train.y.npy", "meta.json"])
@pytest.mark.parametrize("size", [0, 10, -1])
def test_a_damaged_file_of_the_cache_is_named(tmp_path, name, size):
    folder = cache.build_once(tmp_path / "task-1", built)
    truncate(folder / name, -3 if size == -1 else size)
    with pytest.raises(DataError, match=rf"task-1/{name} is damaged .*remove .*task-1, and the data is prepared again"):
        cache.load_arrays(folder)


@pytest.mark.parametrize("name", ["train.x.npy", "test.y.npy", "train.offsets.npy"])
def test_a_missing_array_of_the_cache_is_reported(tmp_path, name):
    sizes = {"train_size": 9, "val_size": 9, "test_size": 9, "min_length": 5, "max_length": 40}
    listops = task("listops", tmp_path, source="generate", **sizes)
    folder = listops.prepare().folder
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{folder.name} is damaged .*remove this folder, and the data is prepared"):
        listops.prepare()


def test_first_of_two_concurrent_builds_wins(tmp_path):
    folder = tmp_path / "task-1"

    def second():
        cache.build_once(folder, built)
        return {"train": {"x": np.zeros((1, 1)), "y": np.zeros(1)}}, {"length": 1}

    cache.build_once(folder, second)
    assert json.loads((folder / "meta.json").read_text()) == {"length": 2}
    assert cache.load_arrays(folder)[0]["train"]["x"].shape == (3, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["task-1"]


def test_key_depends_on_options_and_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = cache.cache_key(["task", {"length": 2}, cache.fingerprint([tmp_path])])
    assert before == cache.cache_key(["task", {"length": 2}, cache.fingerprint([tmp_path])])
    assert before != cache.cache_key(["task", {"length": 3}, cache.fingerprint([tmp_path])])
    (tmp_path / "a.txt").write_text("another")
    assert before != cache.cache_key(["task", {"length": 2}, cache.fingerprint([tmp_path])])
