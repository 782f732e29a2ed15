"""The HTTP application around the engine: its endpoints, wired together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware.cors import CORSMiddleware

from rapid import __version__
from rapid.pictures import encode_png
from rapid_server import responses, schemas
from rapid_server.auth import RequireToken, Tokens
from rapid_server.catalogue import Catalogue
from rapid_server.connections import RefuseCrowd
from rapid_server.engine import Engine
from rapid_server.failures import AnswerFailures, answer_errors, problems
from rapid_server.generation import EndJobs, generation_router
from rapid_server.headers import AddSecurityHeaders
from rapid_server.limits import LimitBody, LimitHead
from rapid_server.logs import LogRequests
from rapid_server.metrics import CountRequests, Metrics
from rapid_server.settings import ServerSettings

if TYPE_CHECKING:
    from rapid.methods.rapid.generator import Generator

STATIC = Path(__file__).parent / "static"
BODY_SECONDS = 30.0


def create_app(generators: Mapping[str, Generator], settings: ServerSettings) -> FastAPI:
    """Make the application that serves models by their names.

    Its engine (`app.state.engine`) starts here and is closed when the application's lifespan ends.
    """
    metrics = Metrics()
    catalogue = Catalogue(generators)
    engine = Engine(
        generators,
        batch=settings.batch,
        max_queued=settings.max_queued,
        max_client=settings.max_client,
        watcher=metrics,
    )
    metrics.watch_queue(lambda: engine.queued)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(
        title="rapid",
        version=__version__,
        description="Synthetic images with a differential privacy guarantee.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # to a host of the client's making
        redirect_slashes=False,
    )
    app.state.engine = engine
    limits = schemas.Limits(max_count=settings.max_count, max_steps=settings.max_steps)
    app.include_router(generation_router(catalogue, engine, limits))
    _add_description(app, catalogue, engine, limits)
    _add_watching(app, engine, metrics)
    _add_pages(app)
    answer_errors(app)
    _add_middleware(app, settings, metrics)
    return app


def _add_middleware(app: FastAPI, settings: ServerSettings, metrics: Metrics) -> None:
    """What every request passes through; the last that is added is the first that it meets."""
    app.add_middleware(EndJobs)
    app.add_middleware(AnswerFailures)
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes, seconds=BODY_SECONDS)
    app.add_middleware(RequireToken, tokens=Tokens(settings.tokens))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Rapid-Seed", "X-Rapid-Model", "X-Rapid-Epsilon", "X-Rapid-Delta", "Retry-After"],
        )
    app.add_middleware(LimitHead)
    app.add_middleware(RefuseCrowd)
    app.add_middleware(AddSecurityHeaders)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(LogRequests)


def _add_description(app: FastAPI, catalogue: Catalogue, engine: Engine, limits: schemas.Limits) -> None:
    models = [model.info for model in catalogue.models.values()]
    info = schemas.Info(**models[0].model_dump(), **limits.model_dump(), models=models)

    @app.get(
        "/info", summary="What the models are, and their privacy statements", responses=problems({401: "No token"})
    )
    async def describe() -> schemas.Info:
        return info

    @app.get(
        "/entries/{entry}",
        summary="The public image of an entry of a knowledge base, as a PNG",
        response_class=Response,
        responses={
            200: {"content": {responses.PNG: {"schema": {"type": "string", "format": "binary"}}}},
            **problems({401: "No token", 422: "No such entry or model", 500: "Failed inside", 503: "Stopping"}),
        },
    )
    async def entry_image(entry: int, model: str | None = None) -> Response:
        found = catalogue.find(model)
        image = await engine.picture(found.name, entry)
        # it never changes while this model is served under this name
        return Response(encode_png(image), media_type=responses.PNG, headers={"Cache-Control": "max-age=600"})


def _add_watching(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Is the process up?")
    async def healthz() -> schemas.Status:
        return schemas.Status(status="up")

    @app.get("/readyz", summary="Has every model made an image?", responses=problems({503: "Not yet, or no longer"}))
    async def readyz() -> schemas.Status:
        if not engine.ready.is_set():
            raise HTTPException(503, "the models are being loaded, or the server is stopping")
        return schemas.Status(status="ready")

    @app.get(
        "/metrics",
        summary="Numbers for Prometheus",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **problems({401: "No token"}),
        },
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

    app.mount("/static", _Files(directory=STATIC), name="static")


class _Files(StaticFiles):
    """Files; a name that no file can have is one that is not there."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        try:
            return super().lookup_path(path)
        except (ValueError, OSError):
            return "", None
