"""What tests of hostile clients share: bytes to send, and what must come back."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

TELLTALE = re.compile(
    rb'traceback|file "|site-packages|/home|/root|/usr|/tmp|uvicorn|starlette|fastapi|pydantic|h11|torch|python', re.I
)

SECONDS = 5.0
"""A small request beside whatever else is going on takes no longer than this, on a slow core."""


class Served(NamedTuple):
    """A server, and a client of it that means well."""

    app: Any
    client: httpx.Client

    def connect(self, timeout: float = 20) -> socket.socket:
        return socket.create_connection((self.client.base_url.host, self.client.base_url.port), timeout)  # type: ignore[arg-type]

    def serves_others(self) -> None:
        begin = time.monotonic()
        response = self.client.post("/generate", json={"count": 1})
        assert response.status_code == 200, response.text
        assert time.monotonic() - begin < SECONDS

    def becomes_idle(self) -> None:
        until(lambda: self.app.state.engine.idle)


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def post(body: dict[str, Any] | bytes, *headers: str, path: str = "/generate", version: str = "1.1") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def rest(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    with connection.makefile("rb") as answer:
        return answer.read()


def talk(served: Served, sent: bytes) -> bytes:
    """Send bytes, then the end; everything that comes back, which tells nothing of what is inside."""
    with served.connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = rest(connection)
    # a client that has closed its half is asked whether it is still there
    answer = re.sub(rb"^(HTTP/1\.1 100 Continue\r\n\r\n)+", b"", answer)
    # what is made says with what: packages are a part of the privacy statement
    if status_of(answer) != 200:
        assert not TELLTALE.search(answer), answer[:2000]
    return answer


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found, answer[:200]
    return int(found[1])


def is_refused(answer: bytes, *statuses: int) -> None:
    """One JSON object with `detail`, or under /v1 `error`, in one chunk or with a length."""
    assert status_of(answer) in statuses, answer[:300]
    found = re.search(rb'\r\n\r\n(?:[0-9a-f]+\r\n)?(\{"detail":.*?\}|\{"error":.*?\}\})', answer, re.S)
    assert found, answer[:300]
    content = json.loads(found[1])
    assert isinstance(content["error"]["message"] if "error" in content else content["detail"], str)
