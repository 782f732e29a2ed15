"""Exception handlers: one response for each kind of exception, without a traceback; that goes to the log."""

from __future__ import annotations

import logging
import textwrap

from fastapi import FastAPI
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid.errors import InputError, RapidError
from rapid.parsing import problem_of
from rapid_server.engine import ClientFullError, EngineFailedError, EngineFullError, EngineStoppedError
from rapid_server.problems import FAILED, STOPPING, has_openai_form, problem_response

_LOG = logging.getLogger(__name__)
OPENAI_ENDPOINTS = "POST /v1/images/generations, GET /v1/models and GET /v1/models/MODEL"


def add_exception_handlers(app: FastAPI) -> None:
    """Give each exception that an endpoint can raise its response."""

    async def bad_input(request: Request, error: Exception) -> Response:
        assert isinstance(error, InputError)
        return problem_response(request.scope, 422, _short(error.describe(error.field)), param=error.field or None)

    async def bad_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1])
        detail = f"{field}: {problem_of(first, 'should')}"
        return problem_response(request.scope, 422, _short(detail), param=field)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if not has_openai_form(request.scope):
            allowed = (error.headers or {}).get("Allow")
            if error.status_code == 405 and allowed:
                error = HTTPException(405, f"{request.method} is not allowed here; use {allowed}", error.headers)
            return await http_exception_handler(request, error)
        detail = error.detail
        if type(error) is HTTPException and error.status_code in (404, 405):
            asked = f"{request.method} {request.url.path}"
            detail = f"there is no {_short(asked, 100)}; there are {OPENAI_ENDPOINTS}"
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        return problem_response(request.scope, error.status_code, detail, error.headers, param=param, code=code)

    async def full(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineFullError)
        status = 429 if isinstance(error, ClientFullError) else 503
        headers = {"Retry-After": str(error.retry_after)}
        return problem_response(request.scope, status, _short(str(error)), headers)

    async def stopped(request: Request, error: Exception) -> Response:
        return problem_response(request.scope, 503, STOPPING)

    async def failed(request: Request, error: Exception) -> Response:
        return problem_response(request.scope, 500, FAILED)

    app.add_exception_handler(HTTPException, refused)
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
            await problem_response(scope, 500, FAILED)(scope, receive, send)


def _short(detail: str, width: int = 400) -> str:
    return textwrap.shorten(detail, width, placeholder=" ...")
