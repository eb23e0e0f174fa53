"""mrconv serve: an HTTP server for a trained model."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from pathlib import Path
from typing import Any

from .parser import CommandError, add_device, add_plugins, command_errors, optional_imports, positive, usable_device

ABOUT = """Serve a trained model over HTTP: POST /predict, WebSocket /stream, /model, /health, /metrics (Prometheus),
and a demo page at /. SIGTERM or Ctrl-C stops the server after it has answered the requests that it has received."""

TOKEN = "MRCONV_TOKEN"


def add(commands: Any) -> None:
    """Add the parser."""
    parser = commands.add_parser("serve", help="serve a trained model over HTTP", description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of a run or of a saved model")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=_port, default=8000, help="default: 8000; 0 chooses a free port")
    add_device(parser)
    add_plugins(parser)
    access = parser.add_mutually_exclusive_group()
    access.add_argument("--token", type=_token, help=f"that every request must send; default: ${TOKEN}")
    access.add_argument("--no-token", action="store_true", help="serve other machines without a token")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="by which clients may address the server"
    )
    parser.add_argument(
        "--max-body", type=positive, metavar="BYTES", help="of a request; default: by the model's inputs"
    )
    parser.add_argument(
        "--max-bodies", type=positive, default=2**28, metavar="BYTES", help="of all requests; default: 268,435,456"
    )
    parser.add_argument("--batch", type=positive, default=32, help="requests per batch, at most; default: 32")
    parser.add_argument(
        "--wait-ms", type=_not_negative, default=5.0, metavar="MS", help="that a request waits for others; default: 5"
    )
    parser.add_argument(
        "--waiting", type=positive, default=1024, metavar="N", help="requests that may wait; default: 1024"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS",
        help="for a request to arrive, for its answer, between messages of a stream; default: 30",
    )  # fmt: skip
    parser.add_argument("--streams", type=positive, default=16, metavar="N", help="open streams, at most; default: 16")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Load the model, listen, serve."""
    with optional_imports("`mrconv serve`", "serve"):
        from mrconv import inference
        from mrconv.serve import Options, describe_model
        from mrconv.serve.server import listen
        from mrconv.serve.server import run as serve
    token, device = _required_token(given), usable_device(given.device)
    with command_errors():
        predictor = inference.load(given.folder, device)
    try:
        listener = listen(given.host, given.port)
    except OSError as error:
        raise CommandError(f"cannot listen on {given.host}, port {given.port}: {error.strerror}") from None
    about, port = describe_model(predictor), listener.getsockname()[1]
    print(f"{about['model']} of {about['parameters']:,} parameters, for {about['kind']}, on {device}")
    if predictor.no_stream:
        print(f"/stream: {predictor.no_stream}")
    url = f"http://{f'[{given.host}]' if ':' in given.host else given.host}:{port}"
    names = ("max_body", "max_bodies", "batch", "wait_ms", "waiting", "timeout", "streams")
    limits = {name: getattr(given, name) for name in names}
    options = Options(**limits, token=token, hosts=(given.host, *given.allow_host))
    serve(predictor, options, listener, lambda: print(url, flush=True))


def _required_token(given: argparse.Namespace) -> str | None:
    """Return the token that requests must send; raise CommandError if other machines need one and there is none."""
    if given.no_token:
        return None
    try:
        token = given.token or (_token(os.environ[TOKEN]) if os.environ.get(TOKEN) else None)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"${TOKEN} {error}") from None
    if token is None and not _is_loopback(given.host):
        raise CommandError(
            f"--host {given.host} serves other machines: give --token or ${TOKEN}, or allow everyone with --no-token"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._~-]{16,}", text):
        raise argparse.ArgumentTypeError("must have at least 16 characters, of letters, digits and . _ ~ -")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0; got {text!r}")
    return value
