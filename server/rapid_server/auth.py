"""Bearer tokens, and the middleware that requires one.

A token has 256 random bits, so nobody can find it from its SHA-256, and no slow hash is needed. Only hashes are stored.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rapid_server.rejection import reject
from rapid_server.setting_types import split_token

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json"})
"""Paths that need no token: health checks cannot send one, and the page asks the user for it."""
OPEN_FOLDER = "/static/"


def new_token() -> str:
    """Make a token; by the prefix, secret scanners and people recognise it."""
    return "rapid_" + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """SHA-256 of a token, in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """The hashes of the known tokens. A client may have several, so that one can be replaced while it is in use."""

    def __init__(self, entries: Iterable[SecretStr]) -> None:
        """Parse `NAME:HASH` entries; raises ValueError if one is malformed."""
        self._known = [split_token(entry) for entry in entries]

    def __bool__(self) -> bool:
        """Whether there are tokens."""
        return bool(self._known)

    def client_of(self, authorization: str | None) -> str | None:
        """The client that sent the header `Authorization: Bearer TOKEN`, or None if the token is unknown.

        All hashes are compared, each in constant time, so that the duration reveals nothing about them.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hash_token(token.strip())
        found = None
        for name, known in self._known:
            if hmac.compare_digest(digest, known):
                found = name
        return found


class RequireToken:
    """ASGI middleware: responds 401 without a known token, except on `OPEN_PATHS`, or if there are no tokens at all.

    It stores the name of the client, or its IP address without one, in `scope["state"]["client"]`.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).getlist("authorization")
        client = self._tokens.client_of(sent[0]) if len(sent) == 1 else None
        if client is None and self._tokens and not _is_open(scope["path"]):
            detail = "unknown token" if sent else "send the header Authorization: Bearer TOKEN"
            await reject(scope, receive, send, 401, detail, {"WWW-Authenticate": "Bearer"})
            return
        scope.setdefault("state", {})["client"] = client or peer(scope)
        await self._app(scope, receive, send)


def peer(scope: Scope) -> str:
    """The IP address of the other end."""
    return str(scope["client"][0]) if scope.get("client") else "unknown"


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
