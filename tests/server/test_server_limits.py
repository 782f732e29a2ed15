"""Bounds on bodies, over real sockets: what a client may send, and what it may only pretend to."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapid_server.limits import LimitBody
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MOST = 1000
SECONDS = 1.5


def limit(**options: Any) -> Middleware:
    """The limit of one body; there is none for all together."""
    return Middleware(LimitBody, max_bytes=MOST, max_sum=1 << 30, **options)


class Asked:
    """An application that answers how many bytes it was sent, and notes how often it was called."""

    def __init__(self) -> None:
        self.calls = 0
        route = Route("/", self.tell, methods=["GET", "POST", "HEAD"])
        self.app = Starlette(routes=[route], middleware=[limit(seconds=SECONDS)])

    async def tell(self, request: Request) -> JSONResponse:
        self.calls += 1
        body = await request.body()
        return JSONResponse({"bytes": len(body), "sum": sum(body)})


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def client(asked: Asked, serving: Any) -> Iterator[httpx.Client]:
    with serving(asked.app) as client:
        yield client


@pytest.fixture
def connection(client: httpx.Client) -> Iterator[socket.socket]:
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as connection:  # type: ignore[arg-type]
        yield connection


def head(*headers: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def chunk(size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, b"x" * size)


def rest(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    with connection.makefile("rb") as answer:
        return answer.read()


def one_answer(connection: socket.socket) -> bytes:
    """The first answer, on a connection that stays open."""
    text = b""
    while b"}" not in text:
        piece = connection.recv(65536)
        assert piece, text
        text += piece
    return text


def is_refused(text: bytes, status: int) -> None:
    top, _, body = text.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status), text
    assert b"connection: close" in top.lower()
    assert body.startswith(b'{"detail":"body: should ')
    assert text.count(b"HTTP/1.1") == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=700), max_size=4), st.booleans())
def test_bodies(client: httpx.Client, pieces: list[bytes], chunked: bool) -> None:
    """Every body up to the limit arrives as it is, in one piece or many; every larger one is refused."""
    body = b"".join(pieces)
    response = client.post("/", content=iter(pieces) if chunked else body)
    if len(body) <= MOST:
        assert response.json() == {"bytes": len(body), "sum": sum(body)}
        assert "connection" not in response.headers
    else:
        assert response.status_code == 413
        assert response.json() == {"detail": f"body: should have at most {MOST} bytes"}
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("size", [0, 1, MOST - 1, MOST])
def test_the_largest_body(client: httpx.Client, size: int) -> None:
    assert client.post("/", content=b"x" * size).json()["bytes"] == size
    assert client.post("/", content=iter([b"x" * size] if size else [])).json()["bytes"] == size


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_many_megabytes_sees_its_answer(client: httpx.Client, asked: Asked, chunked: bool) -> None:
    calls = asked.calls
    body = [b"x" * 100_000] * 300
    for _ in range(5):
        response = client.post("/", content=iter(body) if chunked else b"".join(body))
        assert response.status_code == 413
    assert asked.calls == calls


def test_a_length_that_is_too_large_is_refused_unread(connection: socket.socket, asked: Asked) -> None:
    calls = asked.calls
    connection.sendall(head(f"Content-Length: {MOST + 1}"))
    is_refused(one_answer(connection), 413)
    assert rest(connection) == b""
    assert asked.calls == calls


def test_a_client_that_sends_all_before_it_reads_sees_its_answer(connection: socket.socket) -> None:
    """Closed with unread bytes, the connection would be reset, and the answer lost."""
    connection.sendall(head("Content-Length: 5000000"))
    for _ in range(50):
        connection.sendall(b"x" * 100_000)
        time.sleep(0.002)
    is_refused(rest(connection), 413)


@pytest.mark.parametrize("length", ["9" * 18, "9" * 19])
def test_an_enormous_length(connection: socket.socket, length: str) -> None:
    connection.sendall(head(f"Content-Length: {length}"))
    text = one_answer(connection)
    is_refused(text, 413)


def test_an_endless_chunked_body_is_cut(connection: socket.socket) -> None:
    connection.sendall(head("Transfer-Encoding: chunked"))
    start = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - start < 20:
            connection.sendall(chunk(500))
            time.sleep(0.001)
    assert time.monotonic() - start < 10


def test_a_chunked_body_that_is_too_large_by_one(connection: socket.socket) -> None:
    connection.sendall(head("Transfer-Encoding: chunked") + chunk(MOST) + chunk(1))
    is_refused(rest(connection), 413)


def test_a_length_that_promises_more_than_comes(connection: socket.socket, asked: Asked) -> None:
    calls = asked.calls
    connection.sendall(head("Content-Length: 100") + b"x" * 99)
    is_refused(rest(connection), 408)
    assert asked.calls == calls


def test_a_length_that_promises_less_than_comes(connection: socket.socket) -> None:
    """What is beyond the length is not part of the body, and no request either."""
    connection.sendall(head("Content-Length: 10") + b"x" * 20 + b"\r\n\r\n")
    text = rest(connection)
    assert b'{"bytes":10,"sum":1200}' in text
    assert text.count(b"HTTP/1.1 200 ") == 1
    assert b"HTTP/1.1 400 " in text


def test_a_slow_body_is_refused_though_it_never_stops(connection: socket.socket, asked: Asked) -> None:
    calls = asked.calls
    start = time.monotonic()
    connection.sendall(head("Transfer-Encoding: chunked"))
    connection.settimeout(0.05)
    text = b""
    while b"}" not in text:
        assert time.monotonic() - start < 10
        connection.sendall(chunk(1))
        try:
            text += connection.recv(65536)
        except TimeoutError:
            continue
    assert time.monotonic() - start >= SECONDS
    is_refused(text, 408)
    assert asked.calls == calls


def test_a_client_that_goes_is_forgotten(client: httpx.Client, asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    calls = asked.calls
    for _ in range(3):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:  # type: ignore[arg-type]
            connection.sendall(head("Content-Length: 100") + b"x")
    time.sleep(SECONDS / 2)
    assert client.get("/").json()["bytes"] == 0
    assert asked.calls == calls + 1
    assert not caplog.records


def test_one_connection_for_many_requests(connection: socket.socket) -> None:
    for size in (3, 0, 5):
        connection.sendall(head(f"Content-Length: {size}") + b"x" * size)
        assert b'"bytes":%d,' % size in one_answer(connection)
    connection.sendall(head("Transfer-Encoding: chunked") + chunk(4) + b"0\r\n\r\n")
    assert b'"bytes":4,' in one_answer(connection)


def test_a_client_that_waits_for_leave(connection: socket.socket) -> None:
    connection.sendall(head("Content-Length: 5", "Expect: 100-continue"))
    assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
    connection.sendall(b"xxxxx")
    assert b'"bytes":5,' in one_answer(connection)
    connection.sendall(head("Content-Length: 5000", "Expect: 100-continue"))
    is_refused(one_answer(connection), 413)


def test_the_application_sees_the_client_go(serving: Any) -> None:
    seen: list[str] = []

    async def wait(request: Request) -> JSONResponse:
        seen.append((await request.body()).decode())
        message = await request.receive()
        seen.append(message["type"])
        raise ClientDisconnect

    app = Starlette(routes=[Route("/", wait, methods=["POST"])], middleware=[limit()])
    with serving(app) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/", content=b"ab", timeout=0.3)
    deadline = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == ["ab", "http.disconnect"]
