"""Connections: whoever opens one must also ask something, and take the answer."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import sys
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rapid_server.refusals import LINGER_SECONDS, refuse

HEADER_SECONDS = 20.0
STALLED_SECONDS = 60.0
SILENT_SECONDS = 10.0
PROBE_SECONDS = 0.5
RETRY_SECONDS = 5
_CROWDED = "crowded"


def uvicorn_config(app: ASGIApp, max_connections: int, grace_seconds: float) -> uvicorn.Config:
    """How uvicorn serves `app`."""
    return uvicorn.Config(
        app,
        http=ImpatientProtocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # what a client says of its own address would get it round its limit
        proxy_headers=False,
        ws="none",
        lifespan="on",
        limit_concurrency=max_connections,
        # a little more, for the answers to those that were refused
        timeout_graceful_shutdown=math.ceil(grace_seconds) + 2,
    )


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, always by h11, whose bounds on a request's head are known, and more careful with connections.

    - One on which no request is complete for `header_seconds` is closed; uvicorn itself waits for ever.
    - One whose client takes nothing of its answer for `stalled_seconds` is cut off.
    - A client may close its own half of the connection once it has asked, and gets its answer. It may as well have gone
      altogether, which looks the same: it is sent `100 Continue`, and if it has gone the connection breaks. In the
      middle of an answer nothing can be sent but the answer: where there is none for `silent_seconds`, it has gone.
    - One too many is answered by 503 (see `RefuseCrowd`), and what is not HTTP by 400, both as JSON.
    """

    header_seconds = HEADER_SECONDS
    stalled_seconds = STALLED_SECONDS
    silent_seconds = SILENT_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._clock: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None
        self._seen: Any = None
        self._sent = self._probed = 0
        self._ended = self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        self._counting = _Counting(transport)
        super().connection_made(self._counting)  # type: ignore[arg-type]
        if self._most is not None and len(self.connections) > self._most:
            self.app_state = self.app_state | {_CROWDED: True}
        self._moved = self.loop.time()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        for timer in (self._clock, self._prober):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; what comes after a refusal is dropped."""
        if not self._refused:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True: the connection stays open for the answer."""
        asked = self.cycle is not None and not self.cycle.response_complete
        if self._refused or not asked or self.conn.their_state is h11.SEND_BODY or self.scope["http_version"] == "1.0":
            # before 1.1 there is no `100 Continue` to ask with
            return False
        if not self._ended:
            self._ended = True
            self._spoke = self.loop.time()
            # an answer that comes at once needs no question
            self._prober = self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def on_response_complete(self) -> None:
        """Close the connection of a client that sends no more, when all is answered."""
        super().on_response_complete()
        if self._ended and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, if there is still an answer to give."""
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self.transport.close()
            return
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        content = json.dumps({"detail": "this is not an HTTP request, or its head is too long"}).encode()
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # whoever was reading the body is told that there is no more, and nobody writes behind this answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # closed with unread bytes, the connection would be reset, and the answer lost
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        # the system takes more only when a good part of its megabytes has gone: a slow client would look like none
        sent, now = self._counting.written - unsent - self._in_system(), self.loop.time()
        if not unsent or sent != self._sent:
            self._sent, self._moved = sent, now
        elif now - self._moved >= self.stalled_seconds:
            self._cut()
            return
        if self._clock is not None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.cycle is self._seen:
                # when what is unsent has left
                self.transport.close()
            self._seen = self.cycle
        self._clock = self.loop.call_later(self.header_seconds, self._look)

    def _in_system(self) -> int:
        """Bytes that the system has, and the client not; 0 where it does not tell."""
        try:
            import fcntl
            import termios

            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except (ImportError, OSError, AttributeError):
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def _cut(self) -> None:
        """Forget what is unsent, in the system's buffers as well."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _probe(self) -> None:
        """To a client that has gone altogether the second write fails."""
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        now = self.loop.time()
        if self._counting.written != self._probed:
            self._probed, self._spoke = self._counting.written, now
        elif now - self._spoke > self.silent_seconds:
            self._cut()
            return
        self._prober = self.loop.call_later(PROBE_SECONDS, self._probe)


class _Counting:
    """A transport that knows how many bytes it was given."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data` when there is room."""
        self.written += len(data)
        self._transport.write(data)


class RefuseCrowd:
    """ASGI middleware: a request on one connection too many is answered by 503, and the connection closed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if not scope.get("state", {}).get(_CROWDED):
            await self._app(scope, receive, send)
            return
        headers = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
        await refuse(scope, receive, send, 503, "too many connections are open", headers)
