"""Rejecting a request before its body was read, so that the client still gets the response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from rapid_server.problems import problem_response

LINGER_SECONDS = 1.0
"""How long after the response the rest of a body is still read."""


async def reject(
    scope: Scope, receive: Receive, send: Send, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> None:
    """Respond with an error in the form of the request's path.

    If the request has a body, the connection is closed after the response. What the client still sends is read and
    dropped for `LINGER_SECONDS`: closing a socket with unread bytes resets the connection, and the client might never
    see the response.
    """
    response = problem_response(scope, status, detail, headers)
    if not _has_body(scope):
        await response(scope, receive, send)
        return
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            await _drop(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


async def _drop(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass
