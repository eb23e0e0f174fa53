"""Reuse of freed memory on CPUs."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
LARGEST = 2**31 - 1
LARGEST_BEFORE = 2**25
"""The largest MMAP_THRESHOLD of earlier versions of glibc, which reject others."""


def keep_freed_memory() -> bool:
    """Let the process keep the memory of freed tensors for the next ones; return whether it does.

    By default glibc returns the memory of every large tensor to the system, which has to clear its pages again for the
    next one. The memory of the process then stays near its peak. Nothing changes without glibc, or if the user has set
    these parameters of malloc.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    # Alone, TRIM_THRESHOLD would fix the other at its small initial value.
    mapped = any(mallopt(MMAP_THRESHOLD, size) == 1 for size in (LARGEST, LARGEST_BEFORE))
    return mapped and mallopt(TRIM_THRESHOLD, LARGEST) == 1
