"""Limits of a request: bytes of its head and body, and seconds until the body is complete."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid_server.problems import STOPPING, problem_response
from rapid_server.rejection import reject

BODY_SECONDS = 30.0
SMALL_BODY = 16 * 1024
"""So many bytes of each body do not count in the sum of all: the number of connections limits them."""
CLIENT_SHARE = 0.5
"""Of that sum, at most, for one client."""
RETRY_SECONDS = 1
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
    complete after `seconds`. Bodies count until their responses have left: beyond `max_sum` bytes it responds 503, and
    429 beyond `CLIENT_SHARE` of it for one client. All these close the connection. If the client disconnects while it
    sends, the application is not called.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_sum: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_sum = max_sum
        self._seconds = seconds
        self._bytes_of: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body; pass the request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = _Share(self._bytes_of, scope.get("state", {}).get("client", ""), self._max_sum)
        try:
            replay = await self._read(scope, receive, share)
        except _TooLargeError:
            await reject(scope, receive, send, 413, f"body: should have at most {self._max_bytes} bytes")
        except _FullError as error:
            share.end()
            await reject(scope, receive, send, error.status, str(error), {"Retry-After": str(RETRY_SECONDS)})
        except TimeoutError:
            await reject(scope, receive, send, 408, f"body: should arrive within {self._seconds:g} seconds")
        except asyncio.CancelledError:
            # nobody but a server that ends cancels requests
            await problem_response(scope, 503, STOPPING, {"Connection": "close"})(scope, receive, send)
        else:
            if replay is not None:
                await self._app(scope, replay, send)
        finally:
            share.end()

    async def _read(self, scope: Scope, receive: Receive, share: _Share) -> Receive | None:
        """What delivers the whole body, or None if the client has disconnected."""
        length = Headers(scope=scope).get("content-length", "0")
        if len(length) > _MAX_LENGTH_DIGITS or int(length) > self._max_bytes:
            raise _TooLargeError
        # those that begin can also be completed
        share.grow(int(length) - SMALL_BODY)
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
                share.grow(len(body) - SMALL_BODY)
                if not message.get("more_body", False):
                    return _replay(bytes(body), receive)


class _Share:
    """What one body has of the bytes of all.

    Args:
        bytes_of: bytes by client.
        client: who sends this one.
        max_sum: most bytes of all clients.
    """

    def __init__(self, bytes_of: Counter[str], client: str, max_sum: int) -> None:
        self._bytes_of, self._client, self._max_sum = bytes_of, client, max_sum
        self._size = 0

    def grow(self, size: int) -> None:
        """Count `size` bytes, if that is more than before; raise _FullError if all are too many then."""
        if size <= self._size:
            return
        self._bytes_of[self._client] += size - self._size
        self._size = size
        if self._bytes_of[self._client] > CLIENT_SHARE * self._max_sum:
            raise _FullError(429, "body: your requests are too large together; send fewer at a time, or later")
        if self._bytes_of.total() > self._max_sum:
            raise _FullError(503, "body: all requests are too large together; send it later, or in parts")

    def end(self) -> None:
        """Count nothing any more."""
        self._bytes_of[self._client] -= self._size
        self._size = 0
        if not self._bytes_of[self._client]:
            del self._bytes_of[self._client]


class _TooLargeError(Exception):
    pass


class _FullError(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def _replay(body: bytes, receive: Receive) -> Receive:
    """Deliver the body once, and let go of it; then deliver what follows: the end of the connection."""
    parts = [body]

    async def replay() -> Message:
        if not parts:
            return await receive()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    return replay
