"""What goes wrong: one answer for each kind of error, in words and without a trace; the trace is in the log."""

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
    """The statuses of an endpoint for the OpenAPI description."""
    return {status: {"model": Problem, "description": words} for status, words in statuses.items()}


def answer_errors(app: FastAPI) -> None:
    """Give each error that a request can meet its answer."""

    async def bad_input(request: Request, error: Exception) -> Response:
        return _problem(422, str(error).removeprefix("--"))

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


class AnswerFailures:
    """ASGI middleware: an exception becomes a plain 500, and the connection stays usable.

    (A handler of Exception in Starlette raises again after its answer, and uvicorn then drops the connection.) A client
    that went away before its answer had begun gets none. An answer that fails in the middle ends there; it is not
    complete, and uvicorn closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer for it if it fails before its answer has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            _LOG.info("%s: the client went away", scope["path"])
        except Exception as error:
            if started and isinstance(error.__cause__ or error, RapidError):
                # Starlette wraps those for which there would have been an answer; the engine has told the rest
                _LOG.info("%s: the answer was broken off", scope["path"])
                return
            if started:
                _LOG.exception("%s %r failed in the middle of its answer", scope["method"], scope["path"])
                return
            _LOG.exception("%s %r failed", scope["method"], scope["path"])
            await JSONResponse({"detail": FAILED}, status_code=500)(scope, receive, send)


def _problem(status: int, words: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"detail": textwrap.shorten(words, 400, placeholder=" ...")}, status, headers)
