"""Plain lines that report progress where no terminal shows a bar."""

from __future__ import annotations

import sys
import threading
import time

from .duration import format_duration

INTERVAL = 30.0
"""Seconds between two lines."""


class StatusLines:
    """Prints the latest status on standard error whenever INTERVAL seconds have passed without a line.

    A thread prints: a phase that reports nothing, such as compilation, is not silent either.

    Attributes:
        status: what is being done, and how far it is.
    """

    def __init__(self, status: str) -> None:
        self.status = status
        self.started = self.last_line = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self.started = self.last_line = time.monotonic()
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="status lines", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def postpone(self) -> None:
        """Count the INTERVAL from now, after another line was printed."""
        self.last_line = time.monotonic()

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, self.last_line + INTERVAL - time.monotonic())):
            now = time.monotonic()
            if now < self.last_line + INTERVAL:
                continue
            try:
                print(f"{self.status} ({format_duration(now - self.started)})", file=sys.stderr, flush=True)
            except (OSError, ValueError):  # closed
                return
            self.last_line = now
