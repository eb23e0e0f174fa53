"""The fuzzer itself: what it reports and what it accepts."""

import os
import random
import signal

import pytest

from mrconv.tasks import DataError

from . import mutation
from .mutation import Subject, failures, mutate


def fail(error):
    raise error


def test_mutations_follow_from_the_seed():
    content = bytes(range(256))
    first, again, other = (mutate(content, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(isinstance(mutate(b"", random.Random(seed)), bytes) for seed in range(50))


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda case: (case / "a.bin").read_bytes(), None),
        (lambda case: fail(DataError(f"{case / 'a.bin'} is damaged")), None),
        (lambda case: fail(DataError("it is damaged")), "does not name a.bin: DataError: it is damaged"),
        (lambda case: fail(ValueError(f"{case}\nis damaged")), "not one short line"),
        (lambda case: {}["a"], "KeyError: 'a'"),
        (lambda case: b"1" * (mutation.MEMORY + 2**25), "MiB of memory"),
        (lambda case: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM, after at most 20 s"),
        (lambda case: os._exit(3), "exit 3, after at most 20 s"),
        pytest.param(lambda case: signal.pause(), "SIGKILL, after at most 1 s", marks=pytest.mark.slow),
    ],
    ids=["read", "rejected", "unnamed", "lines", "traceback", "memory", "crash", "exit", "hang"],
)
def test_every_outcome_is_reported(read, problem, tmp_path, monkeypatch):
    if problem is not None and problem.endswith("1 s"):
        monkeypatch.setattr(mutation, "SECONDS", 1)
    found = failures(Subject("files", {"a.bin": b"content"}, read), range(2), tmp_path)
    if problem is None:
        assert found == []
    else:
        assert [line.partition(":")[0] for line in found] == ["files, seed 0", "files, seed 1"]
        assert all(problem in line for line in found)
