"""WebSocket /stream: chunks in and running predictions out, or a prompt in and generated text out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from mrconv.inference import Predictor
from mrconv.tasks import DataError
from mrconv.tasks.raw_inputs import parse_json

from .access import SUBPROTOCOL
from .limits import BodyLimits
from .prometheus import Metrics
from .session import StreamSession, generate_text
from .turns import Turns

T = TypeVar("T")
POLICY_VIOLATION, SERVICE_RESTART, TRY_AGAIN_LATER = 1008, 1012, 1013
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


class StreamHandler:
    """Serves the streams of a model.

    Args:
        model: turns on the model; a stream takes one for each piece of a message, or each symbol that it generates.
        parsing: turns on the interpreter, which the parser of JSON holds.
        limits: bytes of a JSON message, and of messages read ahead per stream.
        timeout: seconds between two messages.
        max_streams: open streams.
        closing: returns whether the server shuts down.
    """

    def __init__(
        self,
        predictor: Predictor,
        metrics: Metrics,
        model: Turns,
        parsing: Turns,
        limits: BodyLimits,
        timeout: float,
        max_streams: int,
        closing: Callable[[], bool],
    ) -> None:
        self.predictor, self.metrics, self.model, self.parsing = predictor, metrics, model, parsing
        self.limits, self.timeout, self.max_streams, self.closing = limits, timeout, max_streams, closing
        self.threads = ThreadPoolExecutor(max_streams, "stream")
        self.open = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serve one stream from its first message to its last."""
        await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
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
                if self.closing():
                    with suppress(WebSocketDisconnect):
                        await socket.close(SERVICE_RESTART)
            finally:
                self.open -= 1

    async def _classify(self, socket: WebSocket) -> None:
        """Answer each chunk with the prediction for the sequence so far."""
        session = await self._run(self.model, StreamSession, self.predictor)
        incoming = ReadAhead(socket, self.limits.other)
        try:
            while True:
                message = await self._receive(incoming.next())
                try:
                    self._check_size(message)
                    pieces, end = await self._run(self.parsing, session.pieces, message)
                    for piece in pieces:
                        self._check_connected(socket)
                        await self._run(self.model, session.feed, piece)
                        self.metrics.positions.inc(len(piece))
                    answer = await self._run(self.model, session.answer, end)
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
                self._check_size(message)
                request = await self._run(self.parsing, parse_json, message)
                answer = await self._send_text(socket, request) | {"end": True}
            except DataError as error:
                answer = {"error": str(error)}
            await self._send(socket, answer)

    async def _send_text(self, socket: WebSocket, request: dict[str, Any]) -> dict[str, Any]:
        """Generate text in a thread and send its pieces; return the final answer."""
        loop, disconnected, turn = asyncio.get_running_loop(), threading.Event(), ExitStack()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def add(piece: str) -> None:
            if disconnected.is_set():
                raise ClientDisconnected
            loop.call_soon_threadsafe(pieces.put_nowait, piece)
            turn.close()
            turn.enter_context(self.model.take("stream"))

        def generate() -> dict[str, Any]:
            with suppress(ClientDisconnected), turn:
                turn.enter_context(self.model.take("stream"))
                return generate_text(self.predictor, request, add)
            return {}

        job = loop.run_in_executor(self.threads, generate)
        job.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                self.metrics.positions.inc()
                await self._send(socket, {"piece": piece})
            return await job
        finally:
            disconnected.set()

    async def _run(self, turns: Turns, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, when it is the stream's turn."""

        def call() -> T:
            with turns.take("stream"):
                return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    def _check_size(self, message: str | bytes) -> None:
        if isinstance(message, str) and len(message) > self.limits.json:
            raise DataError(f"a JSON message may have {self.limits.json:,} characters; got {len(message):,}")

    async def _receive(self, incoming: Awaitable[Message]) -> str | bytes:
        async with asyncio.timeout(self.timeout):
            message = await incoming
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        return message["bytes"] if text is None else text

    def _check_connected(self, socket: WebSocket) -> None:
        """Raise if the client has disconnected or the server shuts down."""
        if self.closing() or socket.client_state == WebSocketState.DISCONNECTED:
            raise WebSocketDisconnect

    async def _send(self, socket: WebSocket, answer: dict[str, Any]) -> None:
        self._check_connected(socket)
        async with asyncio.timeout(self.timeout):
            await socket.send_json(answer)

    async def _reject(self, socket: WebSocket, code: int, message: str) -> None:
        with suppress(WebSocketDisconnect, TimeoutError):
            await self._send(socket, {"error": message})
            await socket.close(code, message[:120])
