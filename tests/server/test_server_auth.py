"""Tokens, and the middleware that wants one, over real sockets."""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from rapid_server.auth import OPEN_PATHS, RequireToken, Tokens, hash_token, new_token
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

# the same in each process: parameters of tests name them
ALICE, BOB, SPARE = (f"rapid_{letter * 43}" for letter in "abs")
ENTRIES = [SecretStr(f"{name}:{hash_token(token)}") for name, token in (("a", ALICE), ("b", BOB), ("a", SPARE))]


async def tell(request: Request) -> JSONResponse:
    return JSONResponse({"client": request.state.client, "bytes": len(await request.body())})


def app(tokens: Tokens) -> Starlette:
    routes = [Route("/{path:path}", tell, methods=["GET", "POST"])]
    return Starlette(routes=routes, middleware=[Middleware(RequireToken, tokens=tokens)])


@pytest.fixture(scope="module")
def closed(serving: Any) -> Iterator[httpx.Client]:
    with serving(app(Tokens(ENTRIES))) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_tokens_are_long_random_and_all_different() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch(r"rapid_[A-Za-z0-9_-]{43}", token) for token in tokens)
    assert hash_token("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of FIPS 180


@pytest.mark.parametrize("word", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_a_token_tells_the_client(word: str) -> None:
    tokens = Tokens(ENTRIES)
    assert [tokens.client_of(f"{word} {token}") for token in (ALICE, BOB, SPARE)] == ["a", "b", "a"]


@given(
    st.none() | st.text() | st.text().map("Bearer ".__add__) | st.sampled_from([ALICE, f"Basic {ALICE}", ALICE[:-1]])
)
def test_anything_else_tells_none(header: str | None) -> None:
    assert Tokens(ENTRIES).client_of(header) is None
    assert Tokens([]).client_of(header) is None


@given(st.integers(0, len(ALICE) - 1), st.characters(codec="ascii"))
def test_every_character_counts(place: int, other: str) -> None:
    changed = ALICE[:place] + other + ALICE[place + 1 :]
    assert Tokens(ENTRIES).client_of(f"Bearer {changed}") == ("a" if changed == ALICE else None)


@pytest.mark.parametrize("token", [ALICE, BOB, SPARE, "wrong"])
def test_every_hash_is_compared_in_constant_time(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def noting(one: str, other: str) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    Tokens(ENTRIES).client_of(f"Bearer {token}")
    assert compared == [(hash_token(token), hash_token(known)) for known in (ALICE, BOB, SPARE)]


@pytest.mark.parametrize("entry", ["", "alice", "alice:", f"alice:{ALICE}", f":{'0' * 64}", f"a b:{'0' * 64}"])
def test_a_malformed_entry_is_refused_unseen(entry: str) -> None:
    with pytest.raises(ValueError, match="should be NAME:HASH") as caught:
        Tokens([SecretStr(entry)])
    assert ALICE not in str(caught.value)


def test_a_known_token_is_let_in(closed: httpx.Client) -> None:
    for token, name in ((ALICE, "a"), (BOB, "b"), (SPARE, "a")):
        for path in ("/generate", "/metrics", "/info"):
            assert closed.get(path, headers=bearer(token)).json()["client"] == name


@pytest.mark.parametrize("path", ["/generate", "/metrics", "/info", "/healthz/", "/static", "/docs/x", "/%2e%2e/x"])
def test_others_are_not(closed: httpx.Client, path: str) -> None:
    for headers in ({}, bearer("wrong"), {"Authorization": ALICE}, {"Authorization": f"Basic {ALICE}"}):
        response = closed.get(path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert isinstance(response.json()["detail"], str)
        assert ALICE not in response.text


def test_two_headers_are_none(closed: httpx.Client) -> None:
    headers = [("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {BOB}")]
    assert closed.get("/info", headers=headers).status_code == 401


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/static/page.js"])
def test_what_is_open(closed: httpx.Client, path: str) -> None:
    assert closed.get(path).json()["client"] == "127.0.0.1"
    assert closed.get(path, headers=bearer("wrong")).json()["client"] == "127.0.0.1"
    assert closed.get(path, headers=bearer(BOB)).json()["client"] == "b"


def test_without_tokens_everything_is(serving: Any) -> None:
    with serving(app(Tokens([]))) as client:
        assert client.get("/generate").json()["client"] == "127.0.0.1"
        assert client.get("/metrics", headers=bearer(ALICE)).json()["client"] == "127.0.0.1"


def test_a_refused_body_is_not_read_and_its_connection_is_closed(closed: httpx.Client) -> None:
    response = closed.post("/generate", content=b"x" * 20_000_000)
    assert response.status_code == 401
    assert response.headers["connection"] == "close"
    address = (closed.base_url.host, closed.base_url.port)
    with socket.create_connection(address, timeout=10) as client:  # type: ignore[arg-type]
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nabc")
        with client.makefile("rb") as answer:
            text = answer.read()  # to the end: the server does not wait for the rest
    assert text.startswith(b"HTTP/1.1 401 ")


def test_a_refused_request_without_a_body_leaves_the_connection_usable(closed: httpx.Client) -> None:
    assert "connection" not in closed.get("/generate").headers
    assert "connection" not in closed.post("/generate", content=b"").headers


@pytest.mark.parametrize("origin", ["https://a", "https://b"])
def test_pages_of_allowed_origins_can_ask_with_any_header(application: Any, serving: Any, origin: str) -> None:
    """Clients of the OpenAI API send some of their own."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-stainless-os",
    }
    with serving(application(cors_origins=("https://a",))) as client:
        answer = client.options("/v1/images/generations", headers=headers)
    allowed = answer.headers.get("access-control-allow-origin") == origin
    assert allowed == (origin == "https://a") == (answer.status_code == 200)
    if allowed:
        named = {name.strip() for name in answer.headers["access-control-allow-headers"].lower().split(",")}
        assert {"x-stainless-lang", "x-stainless-os", "authorization", "content-type"} <= named


def test_pages_of_allowed_origins_can_ask(serving: Any) -> None:
    """With CORS outside: a preflight has no token, and a page may read that it was refused."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["https://a"],
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )
    inner = app(Tokens(ENTRIES))
    inner.user_middleware.insert(0, cors)
    with serving(inner) as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, status in (("https://a", 200), ("https://b", 400)):
            assert client.options("/generate", headers={"Origin": origin, **asked}).status_code == status
        refused = client.post("/generate", headers={"Origin": "https://a"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a")
