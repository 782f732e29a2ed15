"""Exception handlers: one response for each kind of exception, without a traceback; that goes to the log."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid.errors import InputError, RapidError
from rapid_server.engine import ClientFullError, EngineFailedError, EngineFullError, EngineStoppedError
from rapid_server.schemas import Problem

_LOG = logging.getLogger(__name__)
FAILED = "internal error"
STOPPING = "the server is stopping"


def problems(statuses: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Error statuses of an endpoint, for the OpenAPI description."""
    return {status: {"model": Problem, "description": description} for status, description in statuses.items()}


def add_exception_handlers(app: FastAPI) -> None:
    """Give each exception that an endpoint can raise its response."""

    async def bad_input(request: Request, error: Exception) -> Response:
        assert isinstance(error, InputError)
        return _problem(422, error.describe(error.field))

    async def bad_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return _problem(422, f"{first['loc'][-1]}: {first['msg'].removeprefix('Input ')}")

    async def full(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineFullError)
        status = 429 if isinstance(error, ClientFullError) else 503
        return _problem(status, str(error), {"Retry-After": str(error.retry_after)})

    async def stopped(request: Request, error: Exception) -> Response:
        return _problem(503, STOPPING)

    async def failed(request: Request, error: Exception) -> Response:
        return _problem(500, FAILED)

    app.add_exception_handler(InputError, bad_input)
    app.add_exception_handler(RequestValidationError, bad_parameter)
    app.add_exception_handler(EngineFullError, full)
    app.add_exception_handler(EngineStoppedError, stopped)
    app.add_exception_handler(EngineFailedError, failed)


class CatchExceptions:
    """ASGI middleware: an unhandled exception becomes a plain 500, and the connection stays usable.

    (Starlette's handler of Exception raises again after its response, and uvicorn then drops the connection.) A client
    that went away before its response started gets none. A response that fails half-way stays incomplete, and uvicorn
    closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; respond if it fails before its response has started."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def track(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, track)
        except ClientDisconnect:
            _LOG.info("%s: the client disconnected", scope["path"])
        except Exception as error:
            if started and isinstance(error.__cause__ or error, RapidError):
                # Starlette wraps exceptions that have a handler; the engine has logged the rest
                _LOG.info("%s: the response was cut short", scope["path"])
                return
            if started:
                _LOG.exception("%s %r failed in the middle of its response", scope["method"], scope["path"])
                return
            _LOG.exception("%s %r failed", scope["method"], scope["path"])
            await JSONResponse({"detail": FAILED}, status_code=500)(scope, receive, send)


def _problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"detail": textwrap.shorten(detail, 400, placeholder=" ...")}, status, headers)
