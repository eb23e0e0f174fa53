"""The server: uvicorn, and clients that do not finish what they begin."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .app import Options, create_app
from .predictor import Served
from .websockets import Streams

HEAD = 2**16  # bytes of the head of a request, about


class Impatient(HttpToolsProtocol):
    """HTTP that closes a connection which does not send its requests in time, or heads without an end.

    uvicorn waits for ever, and keeps all. The application waits for the body of a request that it reads.
    """

    seconds: float
    deadline: asyncio.TimerHandle | None = None
    unread = 0  # bytes since the last that were part of a body, or the first of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a first request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Refuse a head, or what stands behind a body in parts, that is too long."""
        self.unread += len(data)
        super().data_received(data)
        if self.unread > HEAD and not self.transport.is_closing():
            body = json.dumps({"error": f"the head of a request may have {HEAD:,} bytes"}).encode()
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a further one."""
        self.unread = 0
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        """Wait no more: the rest is the application's."""
        self.unread = 0
        self._forget()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count anew."""
        self.unread = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Begin to wait for the rest of a body that was not needed for the answer."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._expect()

    def on_message_complete(self) -> None:
        """Wait no more."""
        self.unread = 0
        self._forget()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Refuse what is no handshake, for its body or its many lines; it would stay open, and fail the shutdown."""
        super().handle_websocket_upgrade()
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            self.send_400_response("Invalid HTTP request received.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self.deadline is None:
            self.deadline = self.loop.call_later(self.seconds, self.transport.close)

    def _forget(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that clients can connect to from now on; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class _Server(uvicorn.Server):
    """Tells when it is up, and its streams when it leaves."""

    ready: Callable[[], None]
    streams: Streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.streams.closing = True
        await super().shutdown(sockets)


def run(served: Served, options: Options, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve, once that is so call `ready`, and go on until SIGTERM or SIGINT.

    Then no connection is accepted any more, and requests that are there get their answers.
    """
    protocol: Any = type("Protocol", (Impatient,), {"seconds": options.timeout})
    app = create_app(served, options)
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
    server.ready, server.streams = ready, app.state.streams
    server.run(sockets=[listener])
