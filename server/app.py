"""The HTTP application around one generator."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from rapid import __version__
from rapid.errors import InputError
from server import negotiate, schemas
from server.failures import AnswerFailures
from server.headers import AddSecurityHeaders
from server.metrics import CountRequests, Metrics
from server.responses import RENDERERS, render
from server.worker import Worker, WorkerStoppedError

if TYPE_CHECKING:
    from rapid.generate import Generator

STATIC = Path(__file__).parent / "static"


def create_app(generator: Generator, *, max_count: int = 1000) -> FastAPI:
    """Make the application that serves `generator`; one request makes at most `max_count` images.

    Its worker (`app.state.worker`) starts here and is closed when the application's lifespan ends.
    """
    metrics = Metrics()
    worker = Worker(generator, metrics.made)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(
        title="rapid",
        version=__version__,
        description="Synthetic images with a differential privacy guarantee.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.worker = worker
    app.add_middleware(AnswerFailures)  # the innermost
    app.add_middleware(AddSecurityHeaders)
    app.add_middleware(CountRequests, metrics=metrics)
    _add_generation(app, generator, worker, max_count)
    _add_description(app, generator, max_count)
    _add_watching(app, worker, metrics)
    _add_pages(app)
    return app


def _add_generation(app: FastAPI, generator: Generator, worker: Worker, max_count: int) -> None:
    request_schema = schemas.request_schema(max_count)

    @app.post(
        "/generate",
        summary="Make images",
        description=f"At most {max_count} at once. As JSON, or by `Accept` as one PNG (a grid where `count` > 1) "
        "or as a zip of PNGs. The seed, epsilon and delta are also in the headers `X-Rapid-...`.",
        response_model=schemas.GenerateResponse,
        responses={
            200: {"content": {"image/png": {}, "application/zip": {}}},
            **_problems({406: "No type that `Accept` takes", 422: "A bad request; `detail` names the field"}),
            **_problems({500: "Failed inside", 503: "The server is stopping"}),
        },
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": request_schema}}}},
    )
    async def generate(request: Request) -> Response:
        media_type = negotiate.choose(",".join(request.headers.getlist("accept")), tuple(RENDERERS))
        if media_type is None:
            raise HTTPException(406, "Accept: can be " + ", ".join(RENDERERS))
        asked = await _read(request, max_count)
        labels = None if asked.labels is None else _resolve(generator, asked.labels)
        try:
            samples = await worker.generate(asked.count, labels, asked.seed)
        except WorkerStoppedError:
            raise HTTPException(503, "the server is stopping") from None
        return await asyncio.to_thread(render, media_type, generator, samples)


def _add_description(app: FastAPI, generator: Generator, max_count: int) -> None:
    info = schemas.Info(
        model=generator.name,
        classes=list(generator.classes),
        image_shape=list(generator.image_shape),
        max_count=max_count,
        privacy=generator.privacy,
        bundle=generator.info,
    )

    @app.get("/info", summary="What the model is, and its privacy statement")
    async def describe() -> schemas.Info:
        return info


def _add_watching(app: FastAPI, worker: Worker, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Is the process up?")
    async def healthz() -> schemas.Status:
        return schemas.Status(status="up")

    @app.get("/readyz", summary="Is the model loaded?", responses=_problems({503: "Not, or no longer"}))
    async def readyz() -> schemas.Status:
        if not worker.running:
            raise HTTPException(503, "the server is stopping")
        return schemas.Status(status="ready")

    @app.get(
        "/metrics",
        summary="Numbers for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def measure() -> Response:
        return metrics.response()


def _add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(STATIC / "docs.html")

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


async def _read(request: Request, max_count: int) -> schemas.GenerateRequest:
    """Check the body. Anything but the JSON type is refused: a form on a foreign page cannot send that one."""
    sent = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if sent != "application/json":
        raise HTTPException(422, "body: should be JSON, sent with the header Content-Type: application/json")
    try:
        return schemas.parse_request(await request.body(), max_count)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def _resolve(generator: Generator, labels: list[int | str]) -> list[int]:
    try:
        return generator.resolve_labels(labels)
    except InputError as error:
        words = textwrap.shorten(str(error).removeprefix("--"), 300, placeholder=" ...")
        raise HTTPException(422, words if words.startswith("labels") else f"labels: {words}") from None


def _problems(statuses: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.Problem, "description": words} for status, words in statuses.items()}
