"""WebSockets: chunks in, the running prediction out; or a prompt in, and what a language model writes after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from mrconv.tasks import DataError

from .predictor import Served
from .prometheus import Metrics
from .request_parsing import parsed
from .session import Stream, generate

T = TypeVar("T")
POLICY_VIOLATION, TRY_AGAIN_LATER = 1008, 1013
OVERHEAD = 1000  # bytes of a message besides its own, about


class Gone(Exception):
    """Nobody listens any more."""


class Ahead:
    """The messages of a client, read before their turn: that it leaves is known as soon as that is read.

    Args:
        most: bytes that may wait; those of a message more are held at most.
    """

    def __init__(self, socket: WebSocket, most: int) -> None:
        self.socket, self.most, self.held = socket, most, 0
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.room = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while self.socket.client_state != WebSocketState.DISCONNECTED:
            message = await self.socket.receive()
            self.held += self._size(message)
            self.messages.put_nowait(message)
            while self.held > self.most:
                self.room.clear()
                await self.room.wait()

    async def next(self) -> Message:
        """Return the message whose turn it is."""
        message = await self.messages.get()
        self.held -= self._size(message)
        self.room.set()
        return message

    def _size(self, message: Message) -> int:
        return OVERHEAD + len(message.get("text") or message.get("bytes") or "")


def same_site(socket: WebSocket) -> bool:
    """Tell whether a browser's page is from here; other programs name no origin."""
    origin = socket.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == socket.headers.get("host")


class Streams:
    """All open streams of a model; `closing` ends them."""

    def __init__(
        self, served: Served, executor: Executor, metrics: Metrics, timeout: float, most: int, ahead: int
    ) -> None:
        self.served, self.executor, self.metrics, self.timeout, self.most = served, executor, metrics, timeout, most
        self.ahead, self.closing = ahead, False
        self.writers = ThreadPoolExecutor(most, "writer")  # of their own: a text takes long, and others want answers
        self.open = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serve one, from its first message to its last; a page of another site is not let in (403)."""
        if not same_site(socket):
            await socket.close(POLICY_VIOLATION)
            return
        await socket.accept()
        if self.served.no_stream:
            await self._refuse(socket, POLICY_VIOLATION, self.served.no_stream)
        elif self.open >= self.most:
            await self._refuse(socket, TRY_AGAIN_LATER, f"{self.most} streams are open already")
        else:
            self.open += 1
            try:
                with self.metrics.streams.track_inprogress():
                    await (self._generated(socket) if self.served.generates else self._classified(socket))
            except TimeoutError:
                await self._refuse(socket, POLICY_VIOLATION, f"nothing came or went for {self.timeout:g} seconds")
            except WebSocketDisconnect:
                pass
            finally:
                self.open -= 1

    async def _classified(self, socket: WebSocket) -> None:
        """Answer every chunk by the prediction so far."""
        stream = await self._run(Stream, self.served)
        coming = Ahead(socket, self.ahead)
        try:
            while True:
                message = await self._received(coming.next())
                try:
                    pieces, end = await asyncio.to_thread(stream.pieces, message)
                    for piece in pieces:
                        self._here(socket)
                        await self._run(stream.feed, piece)
                        self.metrics.positions.inc(len(piece))
                    answer = await self._run(stream.answer, end)
                except DataError as error:
                    answer = {"error": str(error)}
                await self._send(socket, answer)
        finally:
            coming.task.cancel()

    async def _generated(self, socket: WebSocket) -> None:
        """Answer every prompt by what follows it, symbol by symbol and then as a whole."""
        while True:
            message = await self._received(socket.receive())
            try:
                if isinstance(message, bytes):
                    raise DataError('expected JSON, {"text": "..."}; got bytes')
                answer = await self._written(socket, parsed(message)) | {"end": True}
            except DataError as error:
                answer = {"error": str(error)}
            await self._send(socket, answer)

    async def _written(self, socket: WebSocket, found: dict[str, Any]) -> dict[str, Any]:
        loop, gone = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def tell(piece: str) -> None:
            if gone.is_set():
                raise Gone
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def write() -> dict[str, Any]:
            with suppress(Gone):
                return generate(self.served, found, tell)
            return {}

        job = loop.run_in_executor(self.writers, write)
        job.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                self.metrics.positions.inc()
                await self._send(socket, {"piece": piece})
            return await job
        finally:
            gone.set()

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)

    async def _received(self, coming: Awaitable[Message]) -> str | bytes:
        async with asyncio.timeout(self.timeout):
            message = await coming
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        return message["bytes"] if text is None else text

    def _here(self, socket: WebSocket) -> None:
        """Refuse to go on if the client has left, as far as was received, or the server leaves."""
        if self.closing or socket.client_state == WebSocketState.DISCONNECTED:
            raise WebSocketDisconnect

    async def _send(self, socket: WebSocket, answer: dict[str, Any]) -> None:
        self._here(socket)
        async with asyncio.timeout(self.timeout):
            await socket.send_json(answer)

    async def _refuse(self, socket: WebSocket, code: int, why: str) -> None:
        with suppress(WebSocketDisconnect, TimeoutError):
            await self._send(socket, {"error": why})
            await socket.close(code, why[:120])
