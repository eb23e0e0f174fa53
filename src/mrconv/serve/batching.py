"""Dynamic batching: requests that arrive at about the same time run as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class QueueFull(Exception):
    """The limit of pending items is reached."""


class Batcher(Generic[T, R]):
    """Collects up to `size` items that arrive within `wait` seconds of the first, and runs them as one batch.

    Args:
        function: maps a batch of items to their results; it runs in the executor, one batch at a time.
        max_pending: maximum number of pending items.
    """

    def __init__(
        self,
        function: Callable[[Sequence[T]], Sequence[R]],
        executor: Executor,
        size: int,
        wait: float,
        max_pending: int,
    ) -> None:
        self.function, self.executor, self.size, self.wait = function, executor, size, wait
        self.max_pending, self.pending = max_pending, 0
        self.queue: asyncio.Queue[tuple[T, asyncio.Future[R]]] = asyncio.Queue()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Reserve one of the pending slots, from before an item is received until its result is available."""
        if self.pending >= self.max_pending:
            raise QueueFull
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    async def submit(self, item: T) -> R:
        """Return the result of an item."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, future))
        return await future

    async def run(self) -> None:
        """Process batches until cancelled."""
        while True:
            batch = [(item, future) for item, future in await self._collect() if not future.done()]
            if not batch:  # all clients have disconnected
                continue
            items = [item for item, _ in batch]
            try:
                results: Sequence[Any] = await asyncio.get_running_loop().run_in_executor(
                    self.executor, self.function, items
                )
            except Exception as error:
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _collect(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch = [await self.queue.get()]
        try:
            async with asyncio.timeout(self.wait):
                while len(batch) < self.size:
                    batch.append(await self.queue.get())
        except TimeoutError:
            pass
        return batch
