"""Progress callbacks of downloads and of the preparation of data."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int | None], None]
"""Called with the amount done and, if known, the total."""


def no_progress(done: int, total: int | None) -> None:
    """Ignore progress."""


class ProgressCounter:
    """Adds up amounts and reports their sum to a progress callback."""

    def __init__(self, progress: Progress, total: int | None = None) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, amount: int = 1) -> None:
        """Add an amount."""
        self.done += amount
        self.progress(self.done if self.total is None else min(self.done, self.total), self.total)
