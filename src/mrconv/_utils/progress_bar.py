"""Progress of a long task: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from .status_lines import StatusLines

Update = Callable[[int, int | None], None]


def progress_bar(description: str, unit: str = "items") -> AbstractContextManager[Update]:
    """Return a context of a function that shows the completed and the total amount on standard error.

    On a terminal, with rich, a bar appears with the first call and disappears when the amounts are equal, or at the end
    of the block. Elsewhere a plain line is printed every 30 seconds.

    Args:
        description: the text before the bar.
        unit: "items", or "bytes" for amounts with a unit prefix.
    """
    # rich itself would write control codes to a pipe if FORCE_COLOR is set
    bar = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    return _bar(description, unit) if bar else _lines(description, unit)


@contextmanager
def _bar(description: str, unit: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = ("{task.description}", BarColumn(), amount, TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    task = bars.add_task(description, total=None)

    def update(completed: int, total: int | None) -> None:
        if completed == total:
            bars.stop()
        else:
            bars.start()
            bars.update(task, completed=completed, total=total)

    try:
        yield update
    finally:
        bars.stop()


@contextmanager
def _lines(description: str, unit: str) -> Iterator[Update]:
    lines = StatusLines(description)
    lines.start()

    def amount(n: int) -> str:
        return f"{n / 1e6:,.1f} MB" if unit == "bytes" else f"{n:,}"

    def update(completed: int, total: int | None) -> None:
        if completed == total:
            lines.stop()
        else:
            lines.start()
            lines.status = f"{description}: {amount(completed)}{'' if total is None else f' of {amount(total)}'}"

    try:
        yield update
    finally:
        lines.stop()
