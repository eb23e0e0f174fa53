"""Prepared data is there whole, or not at all."""

import json
import multiprocessing
import os

import numpy as np
import pytest

from mrconv.tasks import cache


def built():
    return {"train": {"x": np.arange(6).reshape(3, 2), "y": np.arange(3)}}, {"length": 2}


def test_what_was_built_is_loaded_from_memory_maps(tmp_path):
    folder = cache.cached(tmp_path / "task-1", built)
    splits, meta = cache.load(folder)
    assert meta == {"length": 2}
    assert isinstance(splits["train"]["x"], np.memmap)
    assert splits["train"]["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_it_is_built_once(tmp_path):
    cache.cached(tmp_path / "task-1", built)
    cache.cached(tmp_path / "task-1", lambda: pytest.fail("built again"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_build_that_fails_leaves_nothing(tmp_path, error):
    def broken():
        raise error

    with pytest.raises(error):
        cache.cached(tmp_path / "task-1", broken)
    assert list(tmp_path.iterdir()) == []


def test_one_killed_while_writing_leaves_nothing_that_looks_finished(tmp_path):
    def killed():
        def build():
            os._exit(9)

        cache.cached(tmp_path / "task-1", build)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not (tmp_path / "task-1").exists()
    assert cache.load(cache.cached(tmp_path / "task-1", built))[1] == {"length": 2}


def test_the_first_of_two_at_once_wins(tmp_path):
    folder = tmp_path / "task-1"

    def second():
        cache.cached(folder, built)
        return {"train": {"x": np.zeros((1, 1)), "y": np.zeros(1)}}, {"length": 1}

    cache.cached(folder, second)
    assert json.loads((folder / "meta.json").read_text()) == {"length": 2}
    assert cache.load(folder)[0]["train"]["x"].shape == (3, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["task-1"]


def test_the_key_follows_options_and_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = cache.key(["task", {"length": 2}, cache.fingerprint([tmp_path])])
    assert before == cache.key(["task", {"length": 2}, cache.fingerprint([tmp_path])])
    assert before != cache.key(["task", {"length": 3}, cache.fingerprint([tmp_path])])
    (tmp_path / "a.txt").write_text("another")
    assert before != cache.key(["task", {"length": 2}, cache.fingerprint([tmp_path])])
