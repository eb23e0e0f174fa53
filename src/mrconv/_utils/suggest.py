"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name closest to the given one, or "" if none is close."""
    matches = difflib.get_close_matches(str(name), list(names), 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
