"""Reuse of freed memory on CPUs."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the process keep up to 2 GiB of freed memory for its next tensors; return whether it does.

    By default glibc returns the memory of every large tensor to the system, which has to clear its pages again for the
    next one: half of the time of merged layers at large batches. Nothing changes without glibc, or if the user has set
    these parameters of malloc.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return all(mallopt(parameter, LARGEST) == 1 for parameter in (TRIM_THRESHOLD, MMAP_THRESHOLD))
