"""Compilation by numba, and the random numbers of the compiled generators.

numba's cache of a compiled function only tracks the file that defines it: after a change of this file, delete the
`__pycache__` of the callers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, inline: Literal["never", "always"] = "never") -> F:
    """Compile a function that releases the GIL, cached on disk where possible (decorator)."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True, inline=inline)(function))
    except RuntimeError:  # the cache folder is not writable
        return cast(F, numba.njit(nogil=True, inline=inline)(function))


def inlined(function: F) -> F:
    """Inline a function into its callers (decorator): a call with many arrays spends time on reference counting."""
    return compiled(function, inline="always")


@compiled
def mix(z: np.uint64) -> np.uint64:
    """Return the output of SplitMix64 for a state."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
