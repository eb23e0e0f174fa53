"""The cache of prepared data: atomic writes and keys."""

import json
import multiprocessing
import os

import numpy as np
import pytest

from mrconv.tasks import cache


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
