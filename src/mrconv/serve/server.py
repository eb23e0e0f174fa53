"""The server: uvicorn with the application and its limits."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from mrconv.inference import Predictor

from .app import Options, create_app
from .connections import LimitedProtocol
from .limits import body_limits


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; port 0 chooses a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def is_fault_of_server(record: logging.LogRecord) -> bool:
    """Return False for what uvicorn reports as its own error and is the client's.

    These are a message that is not UTF-8, closed with code 1007, and a handshake that `AccessMiddleware` rejects.
    """
    not_utf8 = bool(record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError))
    return not (not_utf8 or "without completing handshake" in record.getMessage())


def run(predictor: Predictor, options: Options, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, and call `on_ready` once the server is ready for requests.

    After the signal, the server accepts no further connections and answers the requests that it has received.
    """
    protocol: Any = type("Protocol", (LimitedProtocol,), {"timeout": options.timeout})
    limits = body_limits(predictor.preprocessor, predictor.takes_pairs, options.max_body)
    config = uvicorn.Config(
        create_app(predictor, options, on_ready, lambda: server.should_exit),
        http=protocol,
        ws_max_size=limits.other,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=math.ceil(options.timeout),
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    logging.getLogger("uvicorn.error").addFilter(is_fault_of_server)
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
