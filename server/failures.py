"""What fails inside is told to the log with its trace, and to the client without."""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = logging.getLogger(__name__)


class AnswerFailures:
    """ASGI middleware: an exception becomes a plain 500, and the connection stays usable.

    (A handler of Exception in Starlette raises again after its answer, and uvicorn then drops the connection.)
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer for it if it fails before its answer has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if started:
                raise
            _LOG.exception("%s %r failed", scope["method"], scope["path"])
            await JSONResponse({"detail": "internal error"}, status_code=500)(scope, receive, send)
