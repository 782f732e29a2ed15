"""Host names by which a server may be asked, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rapid_server.auth import hash_token, new_token
from rapid_server.hosts import RequireHost
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

KNOWN = ("images.example", "::2", "192.0.2.1")
LOCAL = ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "127.8.8.8", "[::1]:8000", "[::1]")
FOREIGN = ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "0.0.0.0", "[::", "[::]", "", ":80")


def app(known: tuple[str, ...]) -> Starlette:
    routes = [Route("/{path:path}", lambda request: PlainTextResponse("here"), methods=["GET", "POST"])]
    return Starlette(routes=routes, middleware=[Middleware(RequireHost, known=known)])


@pytest.fixture(scope="module")
def local(serving: Any) -> Iterator[httpx.Client]:
    with serving(app(KNOWN)) as client:
        yield client


@pytest.mark.parametrize("host", [*LOCAL, "images.example:8000", "Images.Example", "[::2]:1", "192.0.2.1"])
def test_known(local: httpx.Client, host: str) -> None:
    assert local.get("/", headers={"Host": host}).text == "here"


@pytest.mark.parametrize("host", [*FOREIGN, "a.images.example", "images.example.evil", "2", "[::3]"])
def test_foreign(local: httpx.Client, host: str) -> None:
    answer = local.post("/generate", headers={"Host": host}, content=b"x" * 100_000)
    assert answer.status_code == 421
    assert "allowed_hosts" in answer.json()["detail"]


def test_the_form_of_openai(local: httpx.Client) -> None:
    error = local.get("/v1/models", headers={"Host": "evil.example"}).json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "misdirected_request")


def test_any(serving: Any) -> None:
    with serving(app(("*",))) as client:
        assert client.get("/", headers={"Host": "evil.example"}).text == "here"


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 421),
        ({"allowed_hosts": ("evil.example",)}, 200),
        ({"open": True}, 200),
        # a page of another site has no token
        ({"tokens": (f"a:{hash_token(new_token())}",)}, 401),
    ],
    ids=["local", "allowed", "open", "tokens"],
)
def test_a_server(serving: Any, application: Any, settings: dict[str, Any], status: int) -> None:
    with serving(application(**settings)) as client:
        assert client.get("/info", headers={"Host": "evil.example"}).status_code == status
