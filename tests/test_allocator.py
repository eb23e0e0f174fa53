"""Freed memory is reused, unless the user has set other parameters of malloc."""

import contextlib
import os
import resource
from types import SimpleNamespace

import pytest
import torch

from mrconv import cli
from mrconv._utils import allocator

from .processes import CONTEXT

TENSORS, ITEMS = 10, 2**24  # of 64 MiB, larger than any block that glibc reuses by default
LARGE, SMALL = 2**31 - 1, 2**25


def page_faults(keep, environment, pipe):
    """Send how many pages are claimed by tensors of which each is freed before the next."""
    os.environ.update(environment)
    kept = keep and allocator.keep_freed_memory()
    torch.empty(ITEMS).fill_(1)  # may grow the heap
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TENSORS):
        torch.empty(ITEMS).fill_(1)
    pipe.send((kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def in_a_process(keep, **environment):
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=page_faults, args=(keep, environment, sender))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    return found


@pytest.fixture(scope="module")
def default():
    if given := [name for name in allocator.USER_SETTINGS if name in os.environ]:
        pytest.skip(f"{given[0]} is set")
    return in_a_process(keep=False)[1]


def test_freed_memory_is_kept(default):
    kept, faults = in_a_process(keep=True)
    if not kept:
        pytest.skip("this is not glibc")
    assert faults < 0.4 * default  # while the heap grows


@pytest.mark.parametrize("name", allocator.USER_SETTINGS)
def test_the_settings_of_the_user_are_kept(default, name):
    kept, faults = in_a_process(keep=True, **{name: ""})
    assert not kept
    assert faults > 0.6 * default


@pytest.mark.parametrize(
    ("largest", "calls"),
    [
        (LARGE, [("mmap", LARGE), ("trim", LARGE)]),
        (SMALL, [("mmap", LARGE), ("mmap", SMALL), ("trim", LARGE)]),  # glibc before 2.35
        (0, [("mmap", LARGE), ("mmap", SMALL)]),
    ],
)
def test_the_trim_threshold_is_set_only_after_the_other(monkeypatch, largest, calls):
    names = {allocator.MMAP_THRESHOLD: "mmap", allocator.TRIM_THRESHOLD: "trim"}
    made = []

    def mallopt(parameter, value):
        made.append((names[parameter], value))
        return int(names[parameter] == "trim" or value <= largest)

    for name in allocator.USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert allocator.keep_freed_memory() == (largest > 0)
    assert made == calls


@pytest.mark.parametrize(
    ("command", "calls"), [("train --list", 1), ("predict nowhere x.wav", 1), ("evaluate nowhere", 1), ("data list", 0)]
)
def test_commands_with_large_tensors_keep_memory_in_their_own_process(monkeypatch, capsys, command, calls):
    made = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: made.append(command))
    monkeypatch.setattr("sys.argv", ["mrconv", *command.split()])
    for argv, expected in ((command.split(), 0), (None, calls)):
        with contextlib.suppress(SystemExit):
            cli.main(argv)
        assert len(made) == expected
