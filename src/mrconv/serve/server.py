"""The server: uvicorn, and clients that do not finish what they begin."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .app import Options, create_app
from .model import Served


class Impatient(HttpToolsProtocol):
    """HTTP that closes a connection which does not send the head of a request in time; uvicorn waits for ever."""

    seconds: float
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a first request."""
        super().connection_made(transport)
        self._expect()

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a further one."""
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        """Wait no more: the rest is the application's."""
        self._forget()
        super().on_headers_complete()

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
    """Tells when it is up."""

    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def run(served: Served, options: Options, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve, once that is so call `ready`, and go on until SIGTERM or SIGINT.

    Then no connection is accepted any more, and requests that are there get their answers.
    """
    protocol: Any = type("Protocol", (Impatient,), {"seconds": options.timeout})
    config = uvicorn.Config(
        create_app(served, options),
        http=protocol,
        ws_max_size=options.max_body,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=math.ceil(options.timeout),
        log_level="warning",
        access_log=False,
    )
    server = _Server(config)
    server.ready = ready
    server.run(sockets=[listener])
