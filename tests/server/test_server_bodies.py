"""The bodies of all requests together, and bodies in tiny chunks."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from rapid_server.auth import RequireToken, Tokens, hash_token
from rapid_server.connections import CHUNK_BYTES, FREE_CHUNKS
from rapid_server.limits import SMALL_BODY, LimitBody
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests_hostile import Served, is_refused, post, rest, status_of, talk, until

NAMES = ("alice", "bob", "carol")
MOST = 400_000
PIECE = 100_000
COUNTED = PIECE - SMALL_BODY


class Held:
    """An application that answers how many bytes it was sent, large bodies not before `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.waiting = 0
        known = Tokens([SecretStr(f"{name}:{hash_token(name)}") for name in NAMES])
        self.app = Starlette(
            routes=[Route("/", self.tell, methods=["POST"])],
            middleware=[
                Middleware(RequireToken, tokens=known),
                Middleware(LimitBody, max_bytes=MOST, max_sum=MOST, seconds=5),
            ],
        )

    async def tell(self, request: Request) -> JSONResponse:
        size = len(await request.body())
        if size > SMALL_BODY:
            self.waiting += 1
            while not self.go.is_set():
                await asyncio.sleep(0.01)
            self.waiting -= 1
        return JSONResponse({"bytes": size})


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def client(held: Held, serving: Any) -> Iterator[httpx.Client]:
    with serving(held.app) as client:
        yield client
        held.go.set()


def sent(client: httpx.Client, name: str, size: int, *, promised: int | None = None) -> socket.socket:
    """A connection on which `name` has sent a body of `size` bytes, or so much of one that is larger."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port), 20)  # type: ignore[arg-type]
    head = ["POST / HTTP/1.1", "Host: localhost", f"Authorization: Bearer {name}"]
    length = size if promised is None else promised
    connection.sendall("\r\n".join([*head, f"Content-Length: {length}", "", ""]).encode() + b"x" * size)
    return connection


def asked(client: httpx.Client, name: str, body: Any) -> httpx.Response:
    return client.post("/", content=body, headers={"Authorization": f"Bearer {name}"})


def test_large_bodies_count_until_their_responses_have_left(client: httpx.Client, held: Held) -> None:
    """Half of the sum for one client, all of it for all; small bodies are always taken."""
    with ExitStack() as stack:
        for number, name in enumerate(["alice", "alice", "bob", "bob"], 1):
            stack.enter_context(sent(client, name, PIECE))
            until(lambda number=number: held.waiting == number)  # type: ignore[misc]
        assert MOST - 4 * COUNTED < COUNTED
        for chunked in (False, True):
            own = asked(client, "alice", iter([b"x" * PIECE]) if chunked else b"x" * PIECE)
            assert own.status_code == 429
            assert own.headers["retry-after"] == "1"
            assert own.json()["detail"].startswith("body: your requests are too large together")
            others = asked(client, "carol", iter([b"x" * PIECE]) if chunked else b"x" * PIECE)
            assert others.status_code == 503
            assert others.headers["retry-after"] == "1"
        assert asked(client, "alice", b"x" * SMALL_BODY).json() == {"bytes": SMALL_BODY}
        held.go.set()
        until(lambda: held.waiting == 0)
    for name in NAMES:
        assert asked(client, name, b"x" * PIECE).json() == {"bytes": PIECE}


@pytest.mark.parametrize("end", ["close", "wait"])
def test_what_never_comes_counts_no_longer(client: httpx.Client, held: Held, end: str) -> None:
    held.go.set()
    with ExitStack() as stack:
        promised = [stack.enter_context(sent(client, "alice", 10, promised=PIECE)) for _ in range(2)]
        until(lambda: asked(client, "alice", b"x" * PIECE).status_code == 429)
        assert asked(client, "bob", b"x" * PIECE).status_code == 200
        for connection in promised:
            if end == "close":
                connection.close()
            else:
                assert status_of(rest(connection)) == 408
        until(lambda: asked(client, "alice", b"x" * PIECE).status_code == 200)


@pytest.mark.parametrize("path", ["/healthz", "/generate"])
def test_a_body_in_tiny_chunks_is_refused(served: Served, path: str) -> None:
    """A megabyte in chunks of one byte would take seconds to parse, in which nobody else is served."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    begin = time.monotonic()
    answer = talk(served, head + b"1\r\nx\r\n" * 20_000)
    is_refused(answer, 400)
    assert b"its chunks too short" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert time.monotonic() - begin < 2
    served.serves_others()


@pytest.mark.parametrize(
    ("size", "count"),
    [(1, FREE_CHUNKS - 1), (CHUNK_BYTES + 1, 5 * FREE_CHUNKS), (100 * CHUNK_BYTES, 100), (200_000, 5)],
)
def test_other_chunks_are_taken(served: Served, size: int, count: int) -> None:
    """One after another on one connection: each body is counted by itself."""
    for _ in range(3):
        chunks = iter([b" " * size] * count + [b'{"count": 1}'])
        response = served.client.post("/generate", content=chunks, headers={"Content-Type": "application/json"})
        assert response.status_code == 200, response.text
        assert "connection" not in response.headers


def test_a_client_that_sent_more_and_goes_frees_its_place(application: Any, serving: Any) -> None:
    """What it sent after its request is not read before the answer; that it has gone is seen all the same."""
    app = application(batch=4, max_count=5000)
    with serving(app) as client:
        served = Served(app, client)
        body = b'{"count": 5000, "steps": 4}'
        with served.connect() as connection:
            connection.sendall(post(body))
            until(lambda: not app.state.engine.idle)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.2)
            assert not app.state.engine.idle
        begin = time.monotonic()
        served.becomes_idle()
        assert time.monotonic() - begin < 3
