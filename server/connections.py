"""Connections: whoever opens one must also ask something."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 20.0


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's HTTP, but a connection on which no request is complete for `HEADER_SECONDS` is closed.

    uvicorn itself waits for ever for the end of a request's head. A request that is being answered is never cut off.
    """

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._seen: Any = None
        self._clock = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._clock.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._clock = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._look)
