"""HTTP connections: uvicorn's protocol behind time and size limits for what a client sends."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from websockets.server import ServerProtocol

MAX_HEAD = 2**16  # bytes of the head of a request, and of the trailer of a chunked body
GRACE = 1.0  # seconds for the application to answer a late body itself
LINGER = 2.0  # seconds in which a client that still sends can read the answer to what it sends


class ClosableTransport:
    """A transport that ignores what is written after it was closed, as those of asyncio do; uvloop's raise an error.

    uvicorn goes on with a request whose client has disconnected if another request of the client waits behind it.
    """

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write data unless the transport is closed."""
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after what was written; a client that still sends a request can read the answer."""
        if self._protocol.deadline is None:
            self._transport.close()
        else:
            self._protocol.close_after_client()

    def is_closing(self) -> bool:
        """Return whether no more may be written."""
        return self._protocol.lingers or self._transport.is_closing()


class LimitedProtocol(asyncio.Protocol):
    """Checks what arrives with a parser of its own before it passes it on to uvicorn's protocol.

    uvicorn limits neither the time nor the size of a head, and middleware runs only after a complete head. The
    application limits the bodies that it reads. Of uvicorn's protocol, only the methods of `asyncio.Protocol` are used.

    Attributes:
        timeout: seconds for a head, and for the rest of a request after it.
    """

    timeout: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.inner = HttpToolsProtocol(*arguments, **options)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own parser
        self.deadline: asyncio.TimerHandle | None = None
        self.unparsed = 0  # bytes received since the head, a piece of the body, or the request was complete
        self.too_long = False
        self.lingers = False
        self._begin_head()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        self.transport, self.loop = transport, asyncio.get_running_loop()
        self.inner.connection_made(ClosableTransport(transport, self))  # type: ignore[arg-type]
        self._start_timeout(self.timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._cancel_timeout()
        self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause the answers."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Resume the answers."""
        self.inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Pass data on, unless it is not HTTP, has a head or trailer that is too long, or is an invalid handshake."""
        if self.lingers or self.transport.is_closing():
            return
        self.unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self._reject(400, "the request is not HTTP")
            return
        if self.too_long or self.unparsed > MAX_HEAD:
            self._reject(431, f"the head of a request may have {MAX_HEAD:,} bytes")
        elif self.invalid_handshake:
            self._reject(400, "the request is not a WebSocket handshake")
        else:
            self.inner.data_received(data)

    def close_after_client(self) -> None:
        """Send what was written, then discard what arrives until the client closes, or for LINGER seconds.

        A connection closed on bytes that nobody reads is reset, and its client loses the answer.
        """
        if not (self.lingers or self.transport.is_closing()):
            self.lingers = True
            self.transport.write_eof()
            self.transport.resume_reading()
            self._start_timeout(LINGER)

    def on_message_begin(self) -> None:
        """Start the timeout of the next request."""
        self._begin_head()
        self._start_timeout(self.timeout)

    def on_url(self, url: bytes) -> None:
        """Collect the URL."""
        self.url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header, or a line of a trailer."""
        self.headers += name + b": " + value + b"\r\n"
        self._count(len(name) + len(value) + 4)
        if (name.lower(), value.lower()) == (b"upgrade", b"websocket"):
            self.is_handshake = True

    def on_headers_complete(self) -> None:
        """Start the timeout of the body; check a WebSocket handshake: uvicorn leaves invalid ones without an answer."""
        if self.is_handshake and self.parser.should_upgrade():
            protocol, request = ServerProtocol(), self.parser.get_method() + b" " + self.url + b" HTTP/1.1\r\n"
            protocol.receive_data(request + self.headers + b"\r\n")
            self.invalid_handshake = not protocol.events_received()
        self._begin_part()
        self._start_timeout(self.timeout + GRACE)

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a trailer from here."""
        self._begin_part()

    def on_message_complete(self) -> None:
        """Cancel the timeout."""
        self._begin_part()
        self._cancel_timeout()

    def _begin_head(self) -> None:
        self.url, self.headers = bytearray(), bytearray()
        self.is_handshake, self.invalid_handshake = False, False
        self._begin_part()

    def _begin_part(self) -> None:
        self.unparsed = self.head_size = 0

    def _count(self, size: int) -> None:
        self.head_size += size
        self.too_long = self.too_long or self.head_size > MAX_HEAD

    def _start_timeout(self, seconds: float) -> None:
        self._cancel_timeout()
        self.deadline = self.loop.call_later(seconds, self._on_timeout, seconds)

    def _cancel_timeout(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _on_timeout(self, seconds: float) -> None:
        """Close the connection, unless it is the server that does not read: behind a request that it answers first."""
        if self.transport.is_reading():
            self.transport.close()
        else:
            self._start_timeout(seconds)

    def _reject(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.close_after_client()
