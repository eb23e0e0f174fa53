"""The server: uvicorn, with time and size limits for request heads."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mrconv.inference import Predictor

from .app import Options, create_app
from .websockets import StreamHandler

MAX_HEAD = 2**16  # approximate bytes of the head of a request


class LimitedProtocol(HttpToolsProtocol):
    """HTTP with a time limit for request heads and unread bodies, and a size limit for heads.

    Hand-written: uvicorn has neither limit, and middleware runs only after a complete head. The application limits the
    bodies that it reads.
    """

    timeout: float
    deadline: asyncio.TimerHandle | None = None
    head_bytes = 0  # received since the start of the request, or since the last piece of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._start_timeout()

    def data_received(self, data: bytes) -> None:
        """Answer a head, or the trailer of a chunked body, that is too long with 431."""
        self.head_bytes += len(data)
        super().data_received(data)
        if self.head_bytes > MAX_HEAD and not self.transport.is_closing():
            body = json.dumps({"error": f"the head of a request may have {MAX_HEAD:,} bytes"}).encode()
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Start the timeout of the next request."""
        self.head_bytes = 0
        super().on_message_begin()
        self._start_timeout()

    def on_headers_complete(self) -> None:
        """Cancel the timeout: the application limits the body."""
        self.head_bytes = 0
        self._cancel_timeout()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Reset the count of head bytes."""
        self.head_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Start the timeout of a body that the application did not read."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._start_timeout()

    def on_message_complete(self) -> None:
        """Cancel the timeout."""
        self.head_bytes = 0
        self._cancel_timeout()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Answer an incomplete handshake with 400: uvicorn would leave the connection open and fail at shutdown."""
        super().handle_websocket_upgrade()
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            self.send_400_response("Invalid HTTP request received.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._cancel_timeout()
        super().connection_lost(exc)

    def _start_timeout(self) -> None:
        if self.deadline is None:
            self.deadline = self.loop.call_later(self.timeout, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; port 0 chooses a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class _Server(uvicorn.Server):
    """uvicorn's server with a callback after startup; its shutdown ends the streams."""

    on_ready: Callable[[], None]
    streams: StreamHandler

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.streams.closing = True
        await super().shutdown(sockets)


def run(predictor: Predictor, options: Options, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, and call `on_ready` once the server accepts requests.

    After the signal, the server accepts no further connections and answers the requests that it has received.
    """
    protocol: Any = type("Protocol", (LimitedProtocol,), {"timeout": options.timeout})
    app = create_app(predictor, options)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws_max_size=options.max_body,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=math.ceil(options.timeout),
        log_level="warning",
        access_log=False,
    )
    server = _Server(config)
    server.on_ready, server.streams = on_ready, app.state.streams
    server.run(sockets=[listener])
