"""mrconv serve: a trained model over HTTP."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .data import told
from .parser import CommandError, positive

ABOUT = """Serve a trained model over HTTP: POST /predict, WebSocket /stream, /model, /health, /metrics (Prometheus),
and a page to try it on at /. Stops on SIGTERM or Ctrl-C, when the requests that are there have their answers."""


def add(commands: Any) -> None:
    """Add the parser."""
    parser = commands.add_parser("serve", help="serve a trained model over HTTP", description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, or of a model")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=_port, default=8000, help="default: 8000; 0 is any that is free")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--max-body", type=positive, default=10_000_000, metavar="BYTES", help="of a request; default: 10,000,000"
    )
    parser.add_argument("--batch", type=positive, default=32, help="requests answered together, at most; default: 32")
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
    parser.add_argument("--streams", type=positive, default=16, metavar="N", help="that may be open; default: 16")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Load, listen, serve."""
    try:
        import torch

        from mrconv.serve import Options, Served
        from mrconv.serve.server import listen
        from mrconv.serve.server import run as serve
    except ImportError as error:
        raise CommandError(f"`mrconv serve` needs {error.name}: pip install 'mrconv[serve]'") from None
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with told():
        try:
            served = Served(given.folder, device)
        except (RuntimeError, AssertionError) as error:  # of torch, for a device that is not there
            raise CommandError(f"cannot use {given.folder} on {device}: {str(error).splitlines()[0]}") from error
    try:
        listener = listen(given.host, given.port)
    except OSError as error:
        raise CommandError(f"cannot listen on {given.host}, port {given.port}: {error.strerror}") from None
    about, port = served.about(), listener.getsockname()[1]
    print(f"{about['model']} of {about['parameters']:,} parameters, for {about['kind']}, on {device}")
    if served.no_stream:
        print(f"/stream: {served.no_stream}")
    url = f"http://{f'[{given.host}]' if ':' in given.host else given.host}:{port}"
    names = ("max_body", "batch", "wait_ms", "waiting", "timeout", "streams")
    options = Options(**{name: getattr(given, name) for name in names})
    serve(served, options, listener, lambda: print(url, flush=True))


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
        raise argparse.ArgumentTypeError(f"must be a number from 0 on; got {text!r}")
    return value
