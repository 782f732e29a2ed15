"""Logs: one line a request, an id that goes with it, and nothing of what was sent."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from rapid_server.auth import RequireToken, Tokens, hash_token, new_token
from rapid_server.exception_handlers import CatchExceptions
from rapid_server.limits import LimitBody
from rapid_server.logs import OWN_LOGGERS, JsonFormatter, LogRequests, TextFormatter, configure, request_id
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

TOKEN = new_token()
OWN = logging.getLogger("rapid_server.test")

Serving = Callable[[Starlette], AbstractContextManager[httpx.Client]]
Talking = Callable[[], AbstractContextManager[httpx.Client]]


async def make(request: Request) -> JSONResponse:
    await request.body()
    request.state.images = int(request.query_params.get("count", "3"))
    await asyncio.sleep(0.01)
    OWN.warning("in the task")
    await asyncio.to_thread(OWN.warning, "in a thread")
    return JSONResponse({"images": ["picture"], "id": request_id.get()})


async def fail(request: Request) -> JSONResponse:
    raise RuntimeError("inside")


def app() -> Starlette:
    routes = [
        Route("/generate", make, methods=["POST"]),
        Route("/models/{name}", make),
        Route("/fail", fail),
        Mount("/static", routes=[Route("/{file}", make)]),
    ]
    middleware = [
        Middleware(LogRequests),
        Middleware(RequireToken, tokens=Tokens([SecretStr(f"alice:{hash_token(TOKEN)}")])),
        Middleware(LimitBody, max_bytes=100, max_sum=1 << 20),
        Middleware(CatchExceptions),
    ]
    return Starlette(routes=routes, middleware=middleware)


@pytest.fixture
def clean() -> Iterator[None]:
    """What `configure` changes is put back."""
    root, own = logging.getLogger(), [logging.getLogger(name) for name in OWN_LOGGERS]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *own)]
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, *own), levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def talking(clean: None, capsys: pytest.CaptureFixture[str], serving: Serving) -> Talking:
    """A client of the application; a line comes after its answer, so the logs are read when the server has ended."""

    @contextmanager
    def talking() -> Iterator[httpx.Client]:
        configure("json")
        with serving(app()) as client:
            client.headers["Authorization"] = f"Bearer {TOKEN}"
            yield client

    return talking


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def requests(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["logger"] == "rapid_server.logs"]


def test_one_line_for_each_request(talking: Talking, capsys: pytest.CaptureFixture[str]) -> None:
    with talking() as client:
        response = client.post("/generate?count=7", content=b"{}")
    lines = logged(capsys)
    identifier = response.headers["x-request-id"]
    assert [line["request"] for line in lines] == [identifier] * 3
    assert [line["message"] for line in lines[:2]] == ["in the task", "in a thread"]
    (line,) = requests(lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert 0.01 <= line.pop("seconds") < 10
    assert re.fullmatch(
        r"client=alice method=POST path=/generate status=200 seconds=[\d.]+ images=7", line.pop("message")
    )
    assert line == {
        "level": "INFO", "logger": "rapid_server.logs", "request": identifier, "client": "alice", "method": "POST",
        "path": "/generate", "status": 200, "images": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "shown", "status"),
    [
        ("POST", "/generate?label=secret", "/generate", 200),
        ("GET", "/models/secret", "/models/{name}", 200),
        ("GET", "/secret/path", "other", 404),
        ("GET", "/generate", "/generate", 405),
        ("GET", "/fail?secret", "/fail", 500),
        ("GET", "/static/secret", "/{file}", 200),
    ],
)
def test_only_the_route_is_told(
    talking: Talking, capsys: pytest.CaptureFixture[str], method: str, path: str, shown: str, status: int
) -> None:
    with talking() as client:
        response = client.request(method, path, content=b"secret" if method == "POST" else None)
    assert response.status_code == status
    text = capsys.readouterr().err
    (line,) = requests([json.loads(line) for line in text.splitlines()])
    assert (line["method"], line["path"], line["status"]) == (method, shown, status)
    assert line["request"] == response.headers["x-request-id"]
    assert "secret" not in json.dumps(line)
    assert TOKEN not in text
    assert "picture" not in text


def test_refusals_are_logged_too(talking: Talking, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = new_token()
    with talking() as client:
        refused = client.post("/generate", headers={"Authorization": f"Bearer {wrong}"})
        large = client.post("/generate", content=b"x" * 101)
    assert [refused.status_code, large.status_code] == [401, 413]
    assert all(response.headers["x-request-id"] for response in (refused, large))
    text = capsys.readouterr().err
    lines = requests([json.loads(line) for line in text.splitlines()])
    assert [(line["client"], line["status"]) for line in lines] == [("127.0.0.1", 401), ("alice", 413)]
    assert all("images" not in line for line in lines)
    assert wrong not in text


def test_a_failure_has_the_id_of_its_request(talking: Talking, capsys: pytest.CaptureFixture[str]) -> None:
    with talking() as client:
        response = client.get("/fail")
    failure, line = logged(capsys)
    assert failure["level"] == "ERROR"
    assert failure["trace"].endswith("RuntimeError: inside")
    assert failure["request"] == line["request"] == response.headers["x-request-id"]


def test_requests_at_once_keep_their_ids(talking: Talking, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(client: httpx.Client, number: int) -> str:
        response = client.post("/generate", params={"count": number}, headers={"X-Request-Id": f"id-{number}"})
        assert response.headers["x-request-id"] == response.json()["id"]
        return str(response.json()["id"])

    with talking() as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(partial(ask, client), range(32))) == [f"id-{number}" for number in range(32)]
    lines = logged(capsys)
    assert sorted(line["request"] for line in lines) == sorted(f"id-{number}" for number in range(32) for _ in range(3))
    assert all(line["request"] == f"id-{line['images']}" for line in requests(lines))


def test_ids(talking: Talking) -> None:
    valid = re.compile(r"[A-Za-z0-9._-]{1,64}")

    @settings(deadline=None, max_examples=50)
    @given(
        st.from_regex(valid, fullmatch=True)
        | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=99).map(str.strip)
    )
    def check(client: httpx.Client, sent: str) -> None:
        found = client.get("/nothing", headers={"X-Request-Id": sent}).headers["x-request-id"]
        assert found == sent if valid.fullmatch(sent) else re.fullmatch("[0-9a-f]{16}", found)

    with talking() as client:
        check(client)
        assert len({client.get("/nothing").headers["x-request-id"] for _ in range(50)}) == 50


def record(message: str, trace: bool = False) -> logging.LogRecord:
    info = None
    if trace:
        try:
            raise ValueError("line\nbreak")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("server.x", logging.WARNING, "file.py", 1, "%s", (message,), info)


@given(st.text(), st.booleans())
def test_json_is_one_line_that_tells_all(message: str, trace: bool) -> None:
    text = JsonFormatter().format(record(message, trace))
    assert len(text.splitlines()) == 1
    found = json.loads(text)
    assert found["message"] == message.rstrip("\n")
    assert found["level"] == "WARNING"
    assert ("trace" in found) is trace


@given(st.text())
def test_text_is_one_line(message: str) -> None:
    token = request_id.set("id-1")
    try:
        text = TextFormatter().format(record(message))
    finally:
        request_id.reset(token)
    assert len(text.splitlines()) == 1
    assert re.match(r"\S+Z WARNING server\.x \[id-1\] ", text)
    assert " [" not in TextFormatter().format(record("plain"))
    assert TextFormatter().format(record("plain", trace=True)).splitlines()[1] == "Traceback (most recent call last):"


def test_configure_twice_logs_once(clean: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    configure("text")
    OWN.info("heard")
    logging.getLogger("faiss.loader").info("not heard")
    logging.getLogger("faiss.loader").warning("heard too")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO rapid_server.test heard",
        "WARNING faiss.loader heard too",
    ]
