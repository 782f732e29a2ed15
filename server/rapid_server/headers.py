"""Headers: those of security, by which the browser runs only our own scripts, and answers that are headers alone."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class AddSecurityHeaders:
    """ASGI middleware that adds `SECURITY_HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the headers to its response."""

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, add_headers if scope["type"] == "http" else send)


class IgnoreRange:
    """ASGI middleware: a request for a part is answered whole, as RFC 9110 (section 14.2) allows; files are small."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without its header `Range`."""
        if scope["type"] == "http":
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await self._app(scope, receive, send)


class AnswerHead:
    """ASGI middleware: `HEAD` is answered as `GET` (RFC 9110, section 9.3.2); the protocol leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope.get("method") != "HEAD":
            await self._app(scope, receive, send)
            return
        # the protocol reads the method of the outer one
        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:
                # for the log and the metrics
                scope["route"] = inner["route"]
