"""Host names by which a server may be asked, so that pages of other sites cannot reach one without tokens.

A browser lets the pages of a site read the responses of that site. If the site's name is made to lead to this machine
(DNS rebinding), these are the responses of this server; but the header `Host` of such a request has the site's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rapid_server.rejection import reject
from rapid_server.setting_types import ANY_HOST, is_loopback


class RequireHost:
    """ASGI middleware: responds 421 to requests whose header `Host` names neither this machine nor a known host.

    Args:
        app: the application.
        known: names and addresses in lower case, besides localhost and the loopback addresses; `ANY_HOST` stands for
            all.
    """

    def __init__(self, app: ASGIApp, known: Iterable[str]) -> None:
        self._app = app
        self._known = frozenset(known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it before its body is read."""
        if scope["type"] != "http" or all(map(self._knows, Headers(scope=scope).getlist("host"))):
            await self._app(scope, receive, send)
            return
        detail = "the header Host names another host; use http://127.0.0.1 or http://localhost, or see allowed_hosts"
        await reject(scope, receive, send, 421, detail)

    def _knows(self, host: str) -> bool:
        """Whether a value of the header is known, whatever its port."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._known or ANY_HOST in self._known
