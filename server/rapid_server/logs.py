"""Logs: one line per request, as text or JSON, to stderr. They never hold a body, a label, an image or a token."""

from __future__ import annotations

import codecs
import json
import logging
import re
import secrets
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid_server.auth import peer

LogFormat = Literal["text", "json"]
HEADER = "X-Request-Id"
OWN_LOGGERS = ("rapid", "rapid_server")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""ID of the current request, in its task and in threads started by `asyncio.to_thread`."""

_LOG = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# loaded now: without free file descriptors, of which a log tells, a codec cannot be imported
_ESCAPE = codecs.getencoder("unicode_escape")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure(log_format: LogFormat) -> None:
    """Send the logs of this process to stderr; of libraries, only warnings and errors.

    Existing handlers are removed: importing opacus installs one, and each line would appear twice.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO rapid_server.logs [request] message`; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line; control characters in the message are escaped, so that it stays one line."""
        message = _CONTROL.sub(lambda found: _ESCAPE(found.group())[0].decode(), _message(record))
        found = request_id.get()
        where = f" [{found}]" if found else ""
        trace = _trace(self, record)
        line = f"{_time(record)} {record.levelname} {record.name}{where} {message}"
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request, the fields of `LogRequests`, trace."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line."""
        content: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if found := request_id.get():
            content["request"] = found
        content |= getattr(record, "response", {})
        if trace := _trace(self, record):
            content["trace"] = trace
        return json.dumps(content)


class LogRequests:
    """ASGI middleware: gives each request an ID, returns it as `X-Request-Id`, and logs one line.

    The ID is the client's `X-Request-Id` if that is 1 to 64 of A-Z, a-z, 0-9, `.`, `_` and `-`, else random. The line
    has the client (`scope["state"]["client"]`, else the IP address), the method, the route (`other` without one: an
    unknown path may hold anything), the status (`-` if the client disconnected before), the seconds to the last byte,
    and `scope["state"]["images"]` if set.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        identifier = given if _ID.fullmatch(given) else secrets.token_hex(8)
        start = time.perf_counter()
        status: int | None = None

        async def track(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = identifier
            await send(message)

        before = request_id.set(identifier)
        try:
            await self._app(scope, receive, track)
        finally:
            _log(scope, status, time.perf_counter() - start)
            request_id.reset(before)


def _log(scope: Scope, status: int | None, seconds: float) -> None:
    state = scope.get("state", {})
    response: dict[str, Any] = {
        "client": state.get("client") or peer(scope),
        "method": scope["method"],
        "path": getattr(scope.get("route"), "path", "other"),
        "status": status,
        "seconds": round(seconds, 4),
    }
    if "images" in state:
        response["images"] = state["images"]
    words = " ".join(f"{key}={'-' if value is None else value}" for key, value in response.items())
    _LOG.info("%s", words, extra={"response": response})


def _message(record: logging.LogRecord) -> str:
    return record.getMessage().rstrip("\n")


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
