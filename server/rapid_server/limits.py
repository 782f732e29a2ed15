"""Bounds on a request: how many bytes its head and its body have, and how long the body may take."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid_server.refusals import refuse

BODY_SECONDS = 30.0
HEAD_BYTES = 16 * 1024
"""As h11 has it for a head that arrives in parts."""
_LONGEST_LENGTH = 18  # digits: no body is longer, and int() refuses numbers of thousands of digits


class LimitHead:
    """ASGI middleware: a head of more than `HEAD_BYTES` is answered by 431, if it arrived so fast that h11 took it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            if size > HEAD_BYTES:
                await refuse(scope, receive, send, 431, f"the head of a request should have at most {HEAD_BYTES} bytes")
                return
        await self._app(scope, receive, send)


class LimitBody:
    """ASGI middleware that reads the body before the application is called, and hands it on in one piece.

    A body of more than `max_bytes` is answered by 413, at once if Content-Length tells, and one that is not there after
    `seconds` by 408; both close the connection. At most `max_bytes` are held. If the client goes while it
    sends, the application is not called.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body; pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except _TooLargeError:
            await refuse(scope, receive, send, 413, f"body: should have at most {self._max_bytes} bytes")
        except TimeoutError:
            await refuse(scope, receive, send, 408, f"body: should arrive within {self._seconds:g} seconds")
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if the client has gone."""
        length = Headers(scope=scope).get("content-length", "0")
        if len(length) > _LONGEST_LENGTH or int(length) > self._max_bytes:
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
    """Gives the body once, then what comes after it: the end of the connection."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
