"""Turns of requests and streams on a shared resource, such that neither delays the other by more than one turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Lane = Literal["request", "stream"]


class Turns:
    """A fair lock for threads of two lanes: first come first served within a lane, and lanes that wait alternate."""

    def __init__(self) -> None:
        self._mutex, self._busy = threading.Lock(), False
        self._waiting: dict[Lane, deque[threading.Event]] = {"request": deque(), "stream": deque()}

    @contextmanager
    def take(self, lane: Lane) -> Iterator[None]:
        """Hold the lock for one turn of a lane."""
        with self._mutex:
            granted = threading.Event()
            if self._busy:
                self._waiting[lane].append(granted)
            else:
                self._busy = True
                granted.set()
        granted.wait()
        try:
            yield
        finally:
            with self._mutex:
                other: Lane = "stream" if lane == "request" else "request"
                queue = self._waiting[other] or self._waiting[lane]
                if queue:
                    queue.popleft().set()
                else:
                    self._busy = False
