"""Freed memory is reused, unless the user has set other parameters of malloc."""

import os
import resource

import numpy as np
import pytest

from mrconv._utils import allocator

from .processes import CONTEXT

ARRAYS, ITEMS = 10, 2**23  # of 64 MiB, larger than any array that glibc reuses by default


def page_faults(keep, environment, pipe):
    """Send how many pages are claimed by arrays of which each is freed before the next."""
    for name in allocator.USER_SETTINGS:
        os.environ.pop(name, None)
    os.environ.update(environment)
    kept = keep and allocator.keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ARRAYS):
        np.ones(ITEMS)
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
    return in_a_process(keep=False)[1]


def test_freed_memory_is_kept(default):
    kept, faults = in_a_process(keep=True)
    if not kept:
        pytest.skip("this is not glibc")
    assert faults < 0.3 * default  # the pages of one array instead of ten


@pytest.mark.parametrize("name", allocator.USER_SETTINGS)
def test_the_settings_of_the_user_are_kept(default, name):
    kept, faults = in_a_process(keep=True, **{name: ""})
    assert not kept
    assert faults > 0.7 * default
