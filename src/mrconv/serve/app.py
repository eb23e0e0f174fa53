"""The ASGI application: its routes and options."""

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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mrconv.inference import Prediction, Predictor
from mrconv.tasks import DataError
from mrconv.tasks.raw_inputs import Examples

from .batching import Batcher, QueueFull
from .model_description import describe_model
from .prometheus import Metrics, MetricsMiddleware
from .request_parsing import UnsupportedMediaType, parse_body
from .websockets import StreamHandler

ROUTES = frozenset(("/", "/predict", "/model", "/health", "/metrics"))
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:"
)
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnects within a request


@dataclass(frozen=True)
class Options:
    """Limits of the server.

    Attributes:
        max_body: bytes of a request, and of a message of a stream.
        batch: requests per batch.
        wait_ms: milliseconds that the first request of a batch waits for others.
        waiting: requests that may be received, decoded or waiting for the model.
        timeout: seconds for a request to arrive, for its answer, and between two messages of a stream.
        streams: open streams.
    """

    max_body: int = 10_000_000
    batch: int = 32
    wait_ms: float = 5.0
    waiting: int = 1024
    timeout: float = 30.0
    streams: int = 16


def http_error(status: int, message: str, **headers: str) -> HTTPException:
    """Return an exception that is answered with this status and message."""
    return HTTPException(status, message, headers or None)


def create_app(predictor: Predictor, options: Options) -> FastAPI:
    """Return the ASGI application that serves a model."""
    metrics = Metrics()
    executor = ThreadPoolExecutor(1, "model")  # one thread: the kernels of a model use all cores

    def run_batch(examples: Sequence[Examples]) -> Sequence[np.ndarray]:
        metrics.batches.observe(len(examples))
        with metrics.model.time():
            return predictor.probabilities(examples)

    batcher = Batcher(run_batch, executor, options.batch, options.wait_ms / 1000, options.waiting)
    metrics.waiting.set_function(lambda: batcher.pending)
    streams = StreamHandler(predictor, executor, metrics, options.timeout, options.streams, options.max_body)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()
        executor.shutdown(wait=False, cancel_futures=True)  # no client waits for the remaining batches

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # the generated documentation loads scripts from a CDN
    app.state.streams = streams
    app.add_middleware(MetricsMiddleware, metrics=metrics, routes=ROUTES)

    @app.exception_handler(HTTPException)
    async def answer_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.post("/predict", response_model_exclude_defaults=True)  # only what the model's target has
    async def predict(request: Request) -> Prediction:
        """Predict one input: JSON, text, audio or an image."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            with batcher.slot():
                content = await read_body(request, options)
                async with asyncio.timeout(options.timeout):
                    examples = await asyncio.to_thread(parse_body, predictor, content, media_type)
                    windows, results = predictor.windows(examples), list[np.ndarray]()
                    for i in range(0, len(windows), options.batch):  # other requests run between these batches
                        results += await asyncio.gather(*map(batcher.submit, windows[i : i + options.batch]))
                    return predictor.prediction(examples, predictor.combine(examples, results))
        except UnsupportedMediaType as error:
            raise http_error(415, str(error)) from None
        except DataError as error:
            raise http_error(400, str(error)) from None
        except QueueFull:
            raise http_error(503, f"{options.waiting} requests are waiting already", **{"retry-after": "1"}) from None
        except TimeoutError:
            raise http_error(504, f"no answer within {options.timeout:g} seconds") from None

    @app.websocket("/stream")
    async def stream(socket: WebSocket) -> None:
        """Predict a sequence that arrives in chunks, or generate text."""
        await streams.serve(socket)

    _add_information_routes(app, predictor, metrics, options)
    return app


def _add_information_routes(app: FastAPI, predictor: Predictor, metrics: Metrics, options: Options) -> None:
    """Add the routes that do not run the model."""

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Return the description of the model and its inputs."""
        return describe_model(predictor) | {"max_body": options.max_body}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return a constant answer while the server runs."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    page = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """Return the demo page."""
        return HTMLResponse(page, headers={"content-security-policy": CONTENT_SECURITY_POLICY})


async def read_body(request: Request, options: Options) -> bytes:
    """Return the body of a request; stop reading as soon as it is too large or too slow."""
    too_large = http_error(413, f"a body may have {options.max_body:,} bytes", connection="close")
    if int(request.headers.get("content-length", 0)) > options.max_body:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(options.timeout):
            async for chunk in request.stream():
                content += chunk
                if len(content) > options.max_body:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {options.timeout:g} seconds"
        raise http_error(408, message, connection="close") from None
    except ClientDisconnect:
        raise http_error(CLIENT_CLOSED_REQUEST, "the client disconnected before the end of the body") from None
    return bytes(content)
