"""WebSocket /stream: chunks in and running predictions out, or a prompt in and generated text out."""

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

from mrconv.inference import Predictor
from mrconv.tasks import DataError
from mrconv.tasks.raw_inputs import parse_json

from .prometheus import Metrics
from .session import StreamSession, generate_text

T = TypeVar("T")
POLICY_VIOLATION, TRY_AGAIN_LATER = 1008, 1013
OVERHEAD = 1000  # approximate bytes of a queued message besides its payload


class ClientDisconnected(Exception):
    """The client has disconnected: generation stops."""


class ReadAhead:
    """Reads the messages of a client before they are processed, so that a disconnect is noticed at once.

    Args:
        max_bytes: maximum size of queued messages; reading pauses after the message that exceeds it.
    """

    def __init__(self, socket: WebSocket, max_bytes: int) -> None:
        self.socket, self.max_bytes, self.queued = socket, max_bytes, 0
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.has_room = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while self.socket.client_state != WebSocketState.DISCONNECTED:
            message = await self.socket.receive()
            self.queued += self._size(message)
            self.messages.put_nowait(message)
            while self.queued > self.max_bytes:
                self.has_room.clear()
                await self.has_room.wait()

    async def next(self) -> Message:
        """Return the next message."""
        message = await self.messages.get()
        self.queued -= self._size(message)
        self.has_room.set()
        return message

    def _size(self, message: Message) -> int:
        return OVERHEAD + len(message.get("text") or message.get("bytes") or "")


def is_same_origin(socket: WebSocket) -> bool:
    """Return whether a browser's page comes from this server; clients other than browsers send no origin."""
    origin = socket.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == socket.headers.get("host")


class StreamHandler:
    """Serves the streams of a model; setting `closing` ends them.

    Args:
        executor: runs the model.
        timeout: seconds between two messages.
        max_streams: open streams.
        max_bytes: bytes of messages read ahead per stream.
    """

    def __init__(
        self,
        predictor: Predictor,
        executor: Executor,
        metrics: Metrics,
        timeout: float,
        max_streams: int,
        max_bytes: int,
    ) -> None:
        self.predictor, self.executor, self.metrics, self.timeout = predictor, executor, metrics, timeout
        self.max_streams, self.max_bytes, self.closing = max_streams, max_bytes, False
        self.generators = ThreadPoolExecutor(max_streams, "generator")  # generation is long and must not block others
        self.open = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serve one stream from its first message to its last; reject pages of other origins with 403."""
        if not is_same_origin(socket):
            await socket.close(POLICY_VIOLATION)
            return
        await socket.accept()
        if self.predictor.no_stream:
            await self._reject(socket, POLICY_VIOLATION, self.predictor.no_stream)
        elif self.open >= self.max_streams:
            await self._reject(socket, TRY_AGAIN_LATER, f"{self.max_streams} streams are open already")
        else:
            self.open += 1
            try:
                with self.metrics.streams.track_inprogress():
                    await (self._generate(socket) if self.predictor.generates else self._classify(socket))
            except TimeoutError:
                await self._reject(socket, POLICY_VIOLATION, f"no message for {self.timeout:g} seconds")
            except WebSocketDisconnect:
                pass
            finally:
                self.open -= 1

    async def _classify(self, socket: WebSocket) -> None:
        """Answer each chunk with the prediction for the sequence so far."""
        session = await self._run(StreamSession, self.predictor)
        incoming = ReadAhead(socket, self.max_bytes)
        try:
            while True:
                message = await self._receive(incoming.next())
                try:
                    pieces, end = await asyncio.to_thread(session.pieces, message)
                    for piece in pieces:
                        self._check_connected(socket)
                        await self._run(session.feed, piece)
                        self.metrics.positions.inc(len(piece))
                    answer = await self._run(session.answer, end)
                except DataError as error:
                    answer = {"error": str(error)}
                await self._send(socket, answer)
        finally:
            incoming.task.cancel()

    async def _generate(self, socket: WebSocket) -> None:
        """Answer each prompt with the text that follows it, first in pieces and then as a whole."""
        while True:
            message = await self._receive(socket.receive())
            try:
                if isinstance(message, bytes):
                    raise DataError('expected JSON, {"text": "..."}; got bytes')
                answer = await self._send_text(socket, parse_json(message)) | {"end": True}
            except DataError as error:
                answer = {"error": str(error)}
            await self._send(socket, answer)

    async def _send_text(self, socket: WebSocket, request: dict[str, Any]) -> dict[str, Any]:
        """Generate text in a thread and send its pieces; return the final answer."""
        loop, disconnected = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def add(piece: str) -> None:
            if disconnected.is_set():
                raise ClientDisconnected
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def generate() -> dict[str, Any]:
            with suppress(ClientDisconnected):
                return generate_text(self.predictor, request, add)
            return {}

        job = loop.run_in_executor(self.generators, generate)
        job.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                self.metrics.positions.inc()
                await self._send(socket, {"piece": piece})
            return await job
        finally:
            disconnected.set()

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)

    async def _receive(self, incoming: Awaitable[Message]) -> str | bytes:
        async with asyncio.timeout(self.timeout):
            message = await incoming
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        return message["bytes"] if text is None else text

    def _check_connected(self, socket: WebSocket) -> None:
        """Raise if the client has disconnected or the server shuts down."""
        if self.closing or socket.client_state == WebSocketState.DISCONNECTED:
            raise WebSocketDisconnect

    async def _send(self, socket: WebSocket, answer: dict[str, Any]) -> None:
        self._check_connected(socket)
        async with asyncio.timeout(self.timeout):
            await socket.send_json(answer)

    async def _reject(self, socket: WebSocket, code: int, message: str) -> None:
        with suppress(WebSocketDisconnect, TimeoutError):
            await self._send(socket, {"error": message})
            await socket.close(code, message[:120])
