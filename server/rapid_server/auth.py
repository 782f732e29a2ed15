"""Who asks: tokens, and the middleware that wants one.

A token has 256 random bits, so its SHA-256 tells nothing of it, and no slow hash is needed. Only hashes are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rapid_server.entries import split_token
from rapid_server.refusals import refuse

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json"})
"""What is answered without a token: probes cannot send one, and the page asks for it."""
OPEN_FOLDER = "/static/"


def new_token() -> str:
    """Make a token; the prefix lets secret scanners, and people, know what they see."""
    return "rapid_" + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """SHA-256 of a token in hexadecimal digits."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """The known tokens. A client may have several, so that an old one can be replaced while it is still in use."""

    def __init__(self, entries: Iterable[SecretStr]) -> None:
        """Take `NAME:HASH` entries; raises ValueError if one is malformed."""
        self._known = [split_token(entry) for entry in entries]

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._known)

    def client_of(self, authorization: str | None) -> str | None:
        """The name of the client that sent the header `Authorization: Bearer TOKEN`, or None.

        All hashes are compared, each in constant time: how long it takes does not tell which one is near.
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
    """ASGI middleware: without a known token 401, but for `OPEN_PATHS`; anyone is let in if there are no tokens.

    The name of the client, or its IP address where it has none, is left in `scope["state"]["client"]`.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).getlist("authorization")
        client = self._tokens.client_of(sent[0]) if len(sent) == 1 else None
        if client is None and self._tokens and not _is_open(scope["path"]):
            detail = "this token is not known here" if sent else "send the header Authorization: Bearer TOKEN"
            await refuse(scope, receive, send, 401, detail, {"WWW-Authenticate": "Bearer"})
            return
        scope.setdefault("state", {})["client"] = client or peer(scope)
        await self._app(scope, receive, send)


def peer(scope: Scope) -> str:
    """The IP address at the other end."""
    return str(scope["client"][0]) if scope.get("client") else "unknown"


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
