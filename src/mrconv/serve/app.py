"""The ASGI application: its routes and options."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mrconv.inference import Prediction, Predictor
from mrconv.tasks import DataError
from mrconv.tasks.raw_inputs import Examples

from .access import AccessMiddleware
from .batching import Batcher, QueueFull
from .limits import BodyLimits, Budget, BudgetExceeded, body_limits
from .model_description import describe_model
from .prometheus import Metrics, MetricsMiddleware
from .request_parsing import UnsupportedMediaType, parse_body
from .turns import Turns
from .websockets import StreamHandler

PAGE_FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
ROUTES = frozenset(("/predict", "/model", "/health", "/metrics", *PAGE_FILES))
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnects within a request


@dataclass(frozen=True)
class Options:
    """Limits of the server.

    Attributes:
        max_body: bytes of a request, and of a message of a stream; None derives them from the model's inputs.
        max_bodies: bytes of all requests that are received, decoded or waiting for the model.
        batch: requests per batch.
        wait_ms: milliseconds that the first request of a batch waits for others.
        waiting: requests that may be received, decoded or waiting for the model.
        timeout: seconds for a request to arrive, for its answer, and between two messages of a stream.
        streams: open streams.
        token: bearer token of all requests for the model; None requires none.
        hosts: names by which clients may address the server, besides those of the local machine.
    """

    max_body: int | None = None
    max_bodies: int = 2**28
    batch: int = 32
    wait_ms: float = 5.0
    waiting: int = 1024
    timeout: float = 30.0
    streams: int = 16
    token: str | None = None
    hosts: tuple[str, ...] = ()


def http_error(status: int, message: str, **headers: str) -> HTTPException:
    """Return an exception that is answered with this status and message."""
    return HTTPException(status, message, headers or None)


def create_app(
    predictor: Predictor,
    options: Options,
    on_ready: Callable[[], None] = lambda: None,
    closing: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Return the ASGI application that serves a model.

    Args:
        on_ready: called once the application is ready for requests.
        closing: returns whether the server shuts down, which ends the streams.
    """
    metrics, budget, model, parsing = Metrics(), Budget(options.max_bodies), Turns(), Turns()
    limits = body_limits(predictor.preprocessor, predictor.takes_pairs, options.max_body)
    executor = ThreadPoolExecutor(1, "model")

    def run_batch(examples: Sequence[Examples]) -> Sequence[np.ndarray]:
        metrics.batches.observe(len(examples))
        with model.take("request"), metrics.model.time():
            return predictor.probabilities(examples)

    def parse(content: bytes, media_type: str) -> Examples:
        with parsing.take("request"):
            return parse_body(predictor, content, media_type)

    batcher = Batcher(run_batch, executor, options.batch, options.wait_ms / 1000, options.waiting)
    metrics.waiting.set_function(lambda: batcher.pending)
    metrics.body_bytes.set_function(lambda: budget.used)
    streams = StreamHandler(predictor, metrics, model, parsing, limits, options.timeout, options.streams, closing)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        on_ready()
        yield
        worker.cancel()
        executor.shutdown(wait=False, cancel_futures=True)  # no client waits for the remaining batches

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # the generated documentation loads scripts from a CDN
    app.add_middleware(AccessMiddleware, token=options.token, hosts=options.hosts)
    app.add_middleware(MetricsMiddleware, metrics=metrics, routes=ROUTES)

    @app.exception_handler(HTTPException)
    async def answer_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.post("/predict", response_model_exclude_defaults=True)  # only what the model's target has
    async def predict(request: Request) -> Prediction:
        """Predict one input: JSON, text, audio or an image."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        max_body = limits.json if media_type == "application/json" else limits.other
        try:
            with batcher.slot(), budget.share() as reserve:
                content = await read_body(request, max_body, options.timeout, reserve)
                async with asyncio.timeout(options.timeout):
                    examples = await asyncio.to_thread(parse, content, media_type)
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
        except BudgetExceeded:
            message = f"the bodies of all requests together may have {options.max_bodies:,} bytes"
            raise http_error(503, message, connection="close", **{"retry-after": "1"}) from None
        except TimeoutError:
            raise http_error(504, f"no answer within {options.timeout:g} seconds") from None

    @app.websocket("/stream")
    async def stream(socket: WebSocket) -> None:
        """Predict a sequence that arrives in chunks, or generate text."""
        await streams.serve(socket)

    _add_information_routes(app, predictor, metrics, limits)
    return app


def _add_information_routes(app: FastAPI, predictor: Predictor, metrics: Metrics, limits: BodyLimits) -> None:
    """Add the routes that do not run the model."""

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Return the description of the model and its inputs."""
        return describe_model(predictor) | {"max_json": limits.json, "max_body": limits.other}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return a constant answer while the server runs."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    for route, name in PAGE_FILES.items():
        content = (resources.files(__package__) / name).read_text(encoding="utf-8")
        answer = Response(content, media_type=MEDIA_TYPES[name[name.index(".") :]])

        async def page_file(request: Request, answer: Response = answer) -> Response:
            return answer

        app.add_route(route, page_file)


async def read_body(request: Request, max_body: int, timeout: float, reserve: Callable[[int], None]) -> bytes:
    """Return the body of a request; stop reading as soon as it is too large or too slow."""
    too_large = http_error(413, f"a body may have {max_body:,} bytes", connection="close")
    if int(request.headers.get("content-length", 0)) > max_body:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                reserve(len(chunk))
                content += chunk
                if len(content) > max_body:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {timeout:g} seconds"
        raise http_error(408, message, connection="close") from None
    except ClientDisconnect:
        raise http_error(CLIENT_CLOSED_REQUEST, "the client disconnected before the end of the body") from None
    return bytes(content)
