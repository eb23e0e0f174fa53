"""Requests that come at about the same time, answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Busy(Exception):
    """More items wait than may."""


class Batcher(Generic[T, R]):
    """Collects up to `size` items, or what comes within `wait` seconds of the first, and answers them at once.

    Args:
        answer: from a batch of items to their results; runs in the executor, one batch at a time.
        most: places for those who ask; more are refused.
    """

    def __init__(
        self, answer: Callable[[Sequence[T]], Sequence[R]], executor: Executor, size: int, wait: float, most: int
    ) -> None:
        self.answer, self.executor, self.size, self.wait, self.most = answer, executor, size, wait, most
        self.queue: asyncio.Queue[tuple[T, asyncio.Future[R]]] = asyncio.Queue()
        self.pending = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place, from before an item is made until its result is there."""
        if self.pending >= self.most:
            raise Busy
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    async def ask(self, item: T) -> R:
        """Return the item's result."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, future))
        return await future

    async def work(self) -> None:
        """Answer, until cancelled."""
        while True:
            batch = [(item, future) for item, future in await self._collected() if not future.done()]
            if not batch:  # whoever asked has gone
                continue
            items = [item for item, _ in batch]
            try:
                results: Sequence[Any] = await asyncio.get_running_loop().run_in_executor(
                    self.executor, self.answer, items
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

    async def _collected(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch = [await self.queue.get()]
        try:
            async with asyncio.timeout(self.wait):
                while len(batch) < self.size:
                    batch.append(await self.queue.get())
        except TimeoutError:
            pass
        return batch
