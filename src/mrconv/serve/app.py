"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mrconv.tasks import DataError

from .batching import Batcher, Busy
from .predictor import Rows, Served, WrongKind
from .prometheus import GONE, Measured, Metrics
from .websockets import Streams

ROUTES = frozenset(("/", "/predict", "/model", "/health", "/metrics"))
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:"
)


@dataclass(frozen=True)
class Options:
    """How a model is served.

    max_body: bytes of a request or of a message of a stream. batch: requests answered together, at most. wait_ms: how
    long the first of them waits for others. waiting: requests that may arrive, be decoded or wait. timeout: seconds for
    a body to arrive, for an answer, and between two messages of a stream. streams: that may be open.
    """

    max_body: int = 10_000_000
    batch: int = 32
    wait_ms: float = 5.0
    waiting: int = 1024
    timeout: float = 30.0
    streams: int = 16


class Prediction(BaseModel):
    """The likeliest class, the probabilities of all, the positions seen, and what was done to the input."""

    label: str
    probabilities: dict[str, float]
    length: int
    notes: list[str]


def refused(status: int, why: str, **headers: str) -> HTTPException:
    """Return an error that is answered with this status."""
    return HTTPException(status, why, headers or None)


def create_app(served: Served, options: Options) -> FastAPI:
    """Return the service of a model."""
    metrics = Metrics()
    executor = ThreadPoolExecutor(1, "model")  # one thread: a model's kernels use all cores

    def answer(rows: Sequence[Rows]) -> Sequence[np.ndarray]:
        metrics.batches.observe(len(rows))
        with metrics.model.time():
            return served.predict(rows)

    batcher = Batcher(answer, executor, options.batch, options.wait_ms / 1000, options.waiting)
    metrics.waiting.set_function(lambda: batcher.pending)
    streams = Streams(served, executor, metrics, options.timeout, options.streams, options.max_body)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.work())
        yield
        worker.cancel()
        executor.shutdown(wait=False, cancel_futures=True)  # nobody waits for what is left

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # its pages of documentation load from elsewhere
    app.state.streams = streams
    app.add_middleware(Measured, metrics=metrics, routes=ROUTES)

    @app.exception_handler(HTTPException)
    async def told(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.post("/predict")
    async def predict(request: Request) -> Prediction:
        """Answer one input: JSON, a text, a recording or a picture."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            with batcher.place():
                content = await received(request, options)
                async with asyncio.timeout(options.timeout):
                    rows = await asyncio.to_thread(served.rows, content, media_type)
                    found = served.named(await batcher.ask(rows))
        except WrongKind as error:
            raise refused(415, str(error)) from None
        except DataError as error:
            raise refused(400, str(error)) from None
        except Busy:
            raise refused(503, f"{options.waiting} requests wait already", **{"retry-after": "1"}) from None
        except TimeoutError:
            raise refused(504, f"no answer within {options.timeout:g} seconds") from None
        notes = [note for row in rows for note in row.notes]
        return Prediction(**found, length=sum(len(row.x) for row in rows), notes=notes)

    @app.websocket("/stream")
    async def stream(socket: WebSocket) -> None:
        """Answer chunks of one sequence."""
        await streams.serve(socket)

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Tell what the model takes."""
        return served.about() | {"max_body": options.max_body}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Tell that the service is up."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def measured() -> Response:
        """Return the metrics as Prometheus reads them."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    page = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """Return the page."""
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    return app


async def received(request: Request, options: Options) -> bytes:
    """Return the body; one that is too large or too slow is refused as soon as that is known, and not read on."""
    large = refused(413, f"a body may have {options.max_body:,} bytes", connection="close")
    if int(request.headers.get("content-length", 0)) > options.max_body:
        raise large
    content = bytearray()
    try:
        async with asyncio.timeout(options.timeout):
            async for chunk in request.stream():
                content += chunk
                if len(content) > options.max_body:
                    raise large
    except TimeoutError:
        slow = f"the body did not arrive within {options.timeout:g} seconds"
        raise refused(408, slow, connection="close") from None
    except ClientDisconnect:
        raise refused(GONE, "the connection was closed before the body was there") from None
    return bytes(content)
