"""Limits of request bodies: the bytes of one, which follow from the model's inputs, and of all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mrconv.tasks.preprocessing import Preprocessor

MIN_JSON = 2**20  # longer inputs than the model's are accepted and cut, so that the smallest limit is generous
MAX_FILE = 10_000_000  # a recording or image has any resolution, whatever the model's length
ESCAPED = 12  # bytes of a character that JSON escapes as two surrogates
NUMBER = 32  # bytes of a number in JSON with its separators
SEPARATORS = 4  # quotes, comma and space


class BudgetExceeded(Exception):
    """All bodies together would exceed the budget."""


class Budget:
    """Bytes that the bodies of all requests may hold, from their arrival to their answer."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes until the block ends; it raises BudgetExceeded if there are too few."""
        held = 0

        def reserve(size: int) -> None:
            nonlocal held
            if self.used + size > self.total:
                raise BudgetExceeded
            held += size
            self.used += size

        try:
            yield reserve
        finally:
            self.used -= held


class BodyLimits(NamedTuple):
    """Maximum bytes of a body that is JSON, and of any other."""

    json: int
    other: int


def body_limits(inputs: Preprocessor, pairs: bool, given: int | None) -> BodyLimits:
    """Return the limits that the user gave, or those that follow from what a complete input of a model can need."""
    if given is not None:
        return BodyLimits(given, given)
    if inputs.vocabulary:
        position = ESCAPED * max(map(len, inputs.vocabulary)) + SEPARATORS
    else:
        position = NUMBER * inputs.channels + SEPARATORS
    json = max(MIN_JSON, position * inputs.length * (2 if pairs else 1))
    return BodyLimits(json, max(json, MAX_FILE) if inputs.kind in ("audio", "image") else json)
