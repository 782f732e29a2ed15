"""HTTP connections: timeouts for clients that neither send nor read, and a limit on how many are open."""

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
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rapid_server.limits import HEAD_BYTES
from rapid_server.rejection import LINGER_SECONDS, reject

HEADER_SECONDS = 20.0
STALLED_SECONDS = 60.0
SILENT_SECONDS = 10.0
PROBE_SECONDS = 0.5
RETRY_SECONDS = 5
SPARE = 64
"""Connections beyond the limit that are told so; more are reset at once, before they take all file descriptors."""
EXCESS_SECONDS = 2.0
"""What a connection beyond the limit has for its request."""
CHUNK_BYTES = 64
FREE_CHUNKS = 1000
"""A body in more chunks than this, with fewer than `CHUNK_BYTES` on average, is refused: parsing each takes as long as
parsing a large one."""
_EXCESS = "excess_connection"
_STILL_ANSWERED = "/healthz"
"""Beyond the limit, too: who asks would restart a server that has much to do."""


def uvicorn_config(app: ASGIApp, max_connections: int, grace_seconds: float) -> uvicorn.Config:
    """Uvicorn's configuration for `app`.

    Args:
        app: the application.
        max_connections: beyond it, a connection gets one 503 (see `RejectExcessConnections`).
        grace_seconds: how long running requests may take after a signal.
    """
    return uvicorn.Config(
        app,
        http=TimeoutProtocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # a client that chose its own address could evade its limit
        proxy_headers=False,
        ws="none",
        lifespan="on",
        limit_concurrency=max_connections,
        # slightly longer, for the responses to rejected requests
        timeout_graceful_shutdown=math.ceil(grace_seconds) + 2,
    )


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with stricter connections; always h11, whose limits for a request's head are known.

    - A connection on which no request is complete within `header_seconds` is closed; uvicorn itself waits for ever.
    - A connection whose client reads nothing of its response for `stalled_seconds` is reset.
    - A client may close its sending side after the request and still get its response. A client that has gone looks the
      same, so it is sent `100 Continue`; if it has gone, the connection breaks. Within a response nothing else can be
      sent: a client whose response makes no progress for `silent_seconds` counts as gone.
    - It is noticed that a client has gone, even if it sent more than its request: uvicorn itself stops reading then.
    - A connection beyond the limit gets 503 (see `RejectExcessConnections`), and data that is not HTTP, or a body in
      tiny chunks, gets 400, all with JSON bodies. It must send its request within `EXCESS_SECONDS`; those beyond
      `SPARE` more are reset.
    """

    header_seconds = HEADER_SECONDS
    stalled_seconds = STALLED_SECONDS
    silent_seconds = SILENT_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, HEAD_BYTES)
        # uvicorn's own 503 is plain text
        self._limit, self.limit_concurrency = self.limit_concurrency, None
        self._check_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._checked_cycle: Any = None
        self._sent = self._probed = 0
        self._half_closed = self._rejected = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeouts."""
        self._counting = _CountingTransport(transport)
        super().connection_made(self._counting)  # type: ignore[arg-type]
        if self._limit is not None and len(self.connections) > self._limit:
            self.app_state = self.app_state | {_EXCESS: True}
            self.header_seconds = min(self.header_seconds, EXCESS_SECONDS)
            if len(self.connections) > self._limit + SPARE:
                transport.abort()
        self._progress_time = self.loop.time()
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeouts."""
        for timer in (self._check_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take part of a request; data after a rejection is dropped."""
        if self._rejected:
            return
        super().data_received(data)
        # paused after a whole request: whether the client hangs up shows only to those who read
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            sent, _ = self.conn.trailing_data
            if len(sent) <= HEAD_BYTES:
                self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its sending side; return True to keep the connection open for the response."""
        waiting = self.cycle is not None and not self.cycle.response_complete
        if (
            self._rejected
            or not waiting
            or self.conn.their_state is h11.SEND_BODY
            or self.scope["http_version"] == "1.0"
        ):
            # HTTP/1.0 has no `100 Continue` to probe with
            return False
        if not self._half_closed:
            self._half_closed = True
            self._wrote_time = self.loop.time()
            # a response within this time needs no probe
            self._probe_timer = self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def on_response_complete(self) -> None:
        """Close the connection of a client that has closed its sending side, after its last response."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Respond 400 to data that is not HTTP, unless a response has already started."""
        self._rejected = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self.transport.close()
            return
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        detail = "this is not an HTTP request, or its head is too long, or its chunks too short"
        content = json.dumps({"detail": detail}).encode()
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # ends the endpoint that reads the body, and nothing is written after this response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # closing with unread bytes would reset the connection, and the response would be lost
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _check(self) -> None:
        """Close the connection if it is idle or stalled; runs every `header_seconds`."""
        unsent = self.transport.get_write_buffer_size()
        # the kernel's buffers hold megabytes: without them, a slow reader would look like none
        sent, now = self._counting.written - unsent - self._in_kernel(), self.loop.time()
        if not unsent or sent != self._sent:
            self._sent, self._progress_time = sent, now
        elif now - self._progress_time >= self.stalled_seconds:
            self._reset()
            return
        if self._check_timer is not None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.cycle is self._checked_cycle:
                # flushes what is unsent first
                self.transport.close()
            self._checked_cycle = self.cycle
        self._check_timer = self.loop.call_later(self.header_seconds, self._check)

    def _in_kernel(self) -> int:
        """Bytes in the kernel's send buffer; 0 on systems that do not report them."""
        try:
            import fcntl
            import termios

            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except (ImportError, OSError, AttributeError):
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def _reset(self) -> None:
        """Reset the connection; unsent bytes are dropped, also in the kernel."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _probe(self) -> None:
        """Find out whether a half-closed client is still there: if not, the second write fails."""
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        now = self.loop.time()
        if self._counting.written != self._probed:
            self._probed, self._wrote_time = self._counting.written, now
        elif now - self._wrote_time > self.silent_seconds:
            self._reset()
            return
        self._probe_timer = self.loop.call_later(PROBE_SECONDS, self._probe)


class _Connection(h11.Connection):
    """Raises h11.RemoteProtocolError for a body in tiny chunks."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        """The next event that was received."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS and self._bytes < CHUNK_BYTES * self._chunks:
                raise h11.RemoteProtocolError("chunks are too short")
        return event


class _CountingTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Count and send `data`."""
        self.written += len(data)
        self._transport.write(data)


class RejectExcessConnections:
    """ASGI middleware: responds 503 on a connection beyond the limit, but to `/healthz`, and closes it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        if not scope.get("state", {}).get(_EXCESS):
            await self._app(scope, receive, send)
            return
        if scope.get("path") == _STILL_ANSWERED:
            await self._app(scope, receive, _closing(send))
            return
        headers = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
        await reject(scope, receive, send, 503, "too many connections are open", headers)


def _closing(send: Send) -> Send:
    """Send responses that close the connection."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
        await send(message)

    return send_closing
