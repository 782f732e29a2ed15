"""The HTTP application: endpoints and middleware around the engine, wired together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware.cors import CORSMiddleware

from rapid import __version__
from rapid.errors import InputError
from rapid.pictures import encode_png
from rapid.sampling.classifier import Classifier
from rapid_server import responses, schemas
from rapid_server.auth import RequireToken, Tokens
from rapid_server.connections import RejectExcessConnections
from rapid_server.encoder import Encoder
from rapid_server.engine import Engine
from rapid_server.exception_handlers import CatchExceptions, add_exception_handlers
from rapid_server.generation import EndJobs, client_of, generation_router, while_connected
from rapid_server.headers import AddSecurityHeaders, AnswerHead, IgnoreRange
from rapid_server.hosts import RequireHost
from rapid_server.limits import LimitBody, LimitHead
from rapid_server.logs import LogRequests
from rapid_server.metrics import CountRequests, Metrics
from rapid_server.models import ModelRegistry
from rapid_server.openai_api import openai_router
from rapid_server.prediction import prediction_router
from rapid_server.predictor import Predictor
from rapid_server.problems import problems
from rapid_server.settings import ServerSettings

if TYPE_CHECKING:
    from rapid.sampling.generator import Generator

STATIC = Path(__file__).parent / "static"
EXPOSED = [f"X-Rapid-{name}" for name in ("Seed", "Model", "Sha256", "Synthetic", "Epsilon", "Delta")]
EXPOSED += ["X-Request-Id", "Retry-After"]
"""Headers of responses that pages of other sites may read."""
WHOLE = {"Cache-Control": "no-cache", "Accept-Ranges": "none"}
"""Headers of the page's files: after an update none may be mixed with older ones, and they are sent whole."""


def create_app(served: Mapping[str, Generator | Classifier], settings: ServerSettings) -> FastAPI:
    """Make the application that serves models by name.

    Its engine and predictor (`app.state.engine`, `app.state.predictor`) start here, and are closed when its lifespan
    ends.

    Args:
        served: models by name, at least one; the first is the default.
        settings: limits, tokens, origins and batch size.
    """
    metrics = Metrics()
    limits = schemas.Limits(
        max_count=settings.max_count, max_steps=settings.max_steps, image_bytes=settings.image_bytes
    )
    models = ModelRegistry(served, limits)
    classifiers = {name: one for name, one in served.items() if isinstance(one, Classifier)}
    generators = {name: one for name, one in served.items() if not isinstance(one, Classifier)}
    engine = Engine(
        generators,
        batch=settings.batch,
        max_queued=settings.max_queued,
        max_client=settings.max_client,
        observer=metrics,
    )
    metrics.watch_queue(lambda: engine.queued, lambda: engine.queued_seconds)
    encoder = Encoder()
    predictor = Predictor(classifiers, max_queued=settings.max_queued, max_client=settings.max_client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(predictor.close)
        await asyncio.to_thread(engine.close)
        await asyncio.to_thread(encoder.close)

    app = FastAPI(
        title="rapid",
        version=__version__,
        description="Synthetic images with a differential privacy guarantee.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # the target would be a host that the client chose
        redirect_slashes=False,
    )
    app.state.engine, app.state.predictor = engine, predictor
    app.include_router(generation_router(models, engine, encoder, limits))
    app.include_router(prediction_router(models, predictor, limits))
    app.include_router(openai_router(models, engine, encoder, limits))
    _add_description(app, models, engine, limits)
    _add_monitoring(app, engine, predictor, metrics)
    _add_pages(app)
    add_exception_handlers(app)
    _add_middleware(app, settings, metrics)
    return app


def _add_middleware(app: FastAPI, settings: ServerSettings, metrics: Metrics) -> None:
    """Add the middleware; a request passes through the last one first."""
    app.add_middleware(EndJobs)
    app.add_middleware(CatchExceptions)
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes, max_sum=settings.max_bodies_bytes)
    app.add_middleware(RequireToken, tokens=Tokens(settings.tokens))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            # clients of the OpenAI API send some of their own; pages of other origins cannot ask at all
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    if settings.only_local:
        app.add_middleware(RequireHost, known=settings.allowed_hosts)
    app.add_middleware(IgnoreRange)
    app.add_middleware(AnswerHead)
    app.add_middleware(LimitHead)
    app.add_middleware(RejectExcessConnections)
    app.add_middleware(AddSecurityHeaders)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(LogRequests)


def _add_description(app: FastAPI, models: ModelRegistry, engine: Engine, limits: schemas.Limits) -> None:
    info = schemas.Info(
        **models.default.info.model_dump() | limits.model_dump(),
        models=[model.info for model in models.models.values()],
    )

    @app.get("/info", summary="The models and their privacy statements", responses=problems({401: "No token"}))
    async def describe() -> schemas.Info:
        return info

    @app.get(
        "/entries/{entry}",
        summary="The public image of a knowledge base record, as a PNG",
        response_class=Response,
        responses={
            200: {"content": {responses.PNG: {"schema": {"type": "string", "format": "binary"}}}},
            **problems(
                {
                    401: "No token",
                    422: "No such record or model",
                    429: "Too many of your images of records are waiting",
                    500: "Internal error",
                    503: "Stopping, or too many wait",
                }
            ),
        },
    )
    async def entry_image(request: Request, entry: int, model: str | None = None) -> Response:
        found = models.generator(model)
        try:
            image = await while_connected(request, engine.record_image(found.name, entry, client=client_of(request)))
        except InputError as error:
            raise InputError("entry", error.problem, error.value) from None
        # the image stays the same as long as the model has this name
        return Response(encode_png(image), media_type=responses.PNG, headers={"Cache-Control": "max-age=600"})


def _add_monitoring(app: FastAPI, engine: Engine, predictor: Predictor, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Whether the process is up")
    async def healthz() -> schemas.Status:
        return schemas.Status(status="up")

    @app.get(
        "/readyz", summary="Whether every model has made an image", responses=problems({503: "Not yet, or no longer"})
    )
    async def readyz() -> schemas.Status:
        if not engine.ready.is_set() or predictor.failed:
            raise HTTPException(503, "the models are being loaded, or the server is stopping")
        return schemas.Status(status="ready")

    @app.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **problems({401: "No token"}),
        },
    )
    async def read_metrics() -> Response:
        return metrics.response()


def _add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=WHOLE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(STATIC / "docs.html", headers=WHOLE)

    app.mount("/static", _Files(directory=STATIC), name="static")


class _Files(StaticFiles):
    """Static files; an impossible file name is not found, instead of an error."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(WHOLE)
        return response

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        try:
            return super().lookup_path(path)
        except (ValueError, OSError):
            return "", None
