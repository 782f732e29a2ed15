"""Limits of a request: bytes of its head and body, and seconds until the body is complete."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid_server.rejection import reject

BODY_SECONDS = 30.0
HEAD_BYTES = 16 * 1024
"""The same limit that h11 applies to a head that arrives in parts."""
_MAX_LENGTH_DIGITS = 18
"""Of a Content-Length: int() fails on numbers of thousands of digits."""


class LimitHead:
    """ASGI middleware: responds 431 to a head of more than `HEAD_BYTES` that arrived in one part, which h11 accepts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            if size > HEAD_BYTES:
                await reject(scope, receive, send, 431, f"the head of a request should have at most {HEAD_BYTES} bytes")
                return
        await self._app(scope, receive, send)


class LimitBody:
    """ASGI middleware that reads the whole body before it calls the application, and passes it on in one piece.

    It responds 413 to a body of more than `max_bytes`, at once if Content-Length says so, and 408 to one that is not
    complete after `seconds`; both close the connection. It holds at most `max_bytes`. If the client disconnects while
    it sends, the application is not called.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body; pass the request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except _TooLargeError:
            await reject(scope, receive, send, 413, f"body: should have at most {self._max_bytes} bytes")
        except TimeoutError:
            await reject(scope, receive, send, 408, f"body: should arrive within {self._seconds:g} seconds")
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if the client has disconnected."""
        length = Headers(scope=scope).get("content-length", "0")
        if len(length) > _MAX_LENGTH_DIGITS or int(length) > self._max_bytes:
            raise _TooLargeError
        body = bytearray()
        async with asyncio.timeout(self._seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                piece = message.get("body", b"")
                if len(body) + len(piece) > self._max_bytes:
                    raise _TooLargeError
                body += piece
                if not message.get("more_body", False):
                    return bytes(body)


class _TooLargeError(Exception):
    pass


def _replay(body: bytes, receive: Receive) -> Receive:
    """Deliver the body once, then what follows it: the end of the connection."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
