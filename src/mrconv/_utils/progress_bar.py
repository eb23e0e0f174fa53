"""A progress bar on the terminal; needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, unit: str = "items") -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function of the completed and the total amount that shows a bar on standard error, if it is a terminal.

    The bar appears with the first call and disappears when the amounts are equal, or at the end of the block.

    Args:
        description: the text before the bar.
        unit: "items", or "bytes" for amounts with a unit prefix.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = ("{task.description}", BarColumn(), amount, TimeRemainingColumn())
    disabled = not console.is_terminal
    bars = Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=disabled)
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
