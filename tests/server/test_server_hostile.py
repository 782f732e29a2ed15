"""Clients that mean harm, or know no better, over real sockets: each is answered or let go, and others are served."""

from __future__ import annotations

import json
import re
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from rapid_server.connections import TimeoutProtocol
from rapid_server.run import allow_files

STREAMS = ["application/x-ndjson", "text/event-stream", "application/zip"]
TELLTALE = re.compile(
    rb'traceback|file "|site-packages|/home|/root|/usr|/tmp|uvicorn|starlette|fastapi|pydantic|h11|torch|python', re.I
)
MANY = {"count": 5000, "steps": 1}
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


@pytest.fixture(scope="module")
def served(application: Any, serving: Any) -> Iterator[Served]:
    app = application(batch=64, max_count=5000, max_client=12_000, max_queued=50_000)
    with pytest.MonkeyPatch.context() as patch, serving(app) as client:
        patch.setattr(TimeoutProtocol, "silent_seconds", 2.0)
        yield Served(app, client)


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After each test the engine has nothing to do, others are served, and there is no trace in the log."""
    yield
    served.becomes_idle()
    served.serves_others()
    assert not [record for record in caplog.records if record.exc_info]


def post(body: dict[str, Any] | bytes, *headers: str, path: str = "/generate", version: str = "1.1") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
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


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n: empty\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda sent: repr(sent[:60]),
)
def test_what_is_no_request(served: Served, sent: bytes) -> None:
    with served.connect() as connection:
        connection.sendall(sent)
        served.serves_others()
        is_refused(rest(connection), 400)
    is_refused(talk(served, sent), 400)


@pytest.mark.parametrize("version", ["1.0", "2.0", "9.9"])
def test_other_versions(served: Served, version: str) -> None:
    assert status_of(talk(served, f"GET /healthz HTTP/{version}\r\nHost: x\r\n\r\n".encode())) == 200


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"x" * 65536,
        b"Accept: " + b"text/html, " * 6000,
        b"Accept: " + b"a/b;q=0." + b"1" * 65536,
        b"\r\n".join(b"X-%d: 1" % number for number in range(20_000)),
        b"Cookie: " + b"a=b; " * 13_000,
    ],
    ids=lambda head: repr(head[:12]),
)
def test_a_head_that_is_too_long(served: Served, head: bytes) -> None:
    """The answer arrives although the client was still sending."""
    with served.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + head + b"\r\n\r\n")
        served.serves_others()
        # by h11 if it came in parts, by LimitHead if at once
        is_refused(rest(connection), 400, 431)
    with served.connect() as connection:
        connection.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        is_refused(rest(connection), 400, 431)


def test_a_long_accept_that_is_still_a_head(served: Served) -> None:
    types = ", ".join(f"a{number}/b;q=0.{number}" for number in range(700))
    assert served.client.post("/generate", json={"count": 1}, headers={"Accept": types}).status_code == 406
    accept = {"Accept": types + ", image/png;q=0.001"}
    assert served.client.post("/generate", json={"count": 1}, headers=accept).headers["content-type"] == "image/png"


@pytest.mark.parametrize("accept", ["application/json", "image/png", *STREAMS])
def test_a_client_that_closes_its_half_gets_its_answer(served: Served, accept: str) -> None:
    answer = talk(served, post({"count": 20, "seed": 1}, f"Accept: {accept}"))
    assert status_of(answer) == 200
    assert answer.count(b"HTTP/1.1") == 1
    if b"content-length" in answer.lower():
        head, _, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        assert length
        assert len(body) == int(length[1])
    else:
        assert answer.endswith(b"\r\n0\r\n\r\n")


def test_a_half_closed_client_gets_all_that_it_asked(served: Served) -> None:
    answer = talk(served, 3 * post({"count": 2}) + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 4
    # the last is over, so the connection is, at once and not when it is seen to be idle
    begin = time.monotonic()
    assert talk(served, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").count(b"HTTP/1.1 200 ") == 1
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("accept", ["application/json", *STREAMS])
@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("seconds", [0, 0.002, 0.2])
def test_a_client_that_goes_at_any_moment(served: Served, accept: str, way: str, seconds: float) -> None:
    with served.connect() as connection:
        connection.sendall(post({"count": 5000}, f"Accept: {accept}"))
        if way == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(seconds)
    served.serves_others()
    served.becomes_idle()


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def never_reads(served: Served, accept: str) -> socket.socket:
    """Asks for more than the buffers of both systems take, at one network call for an image."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((served.client.base_url.host, served.client.base_url.port))
    connection.sendall(post(MANY, f"Accept: {accept}"))
    return connection


@pytest.mark.parametrize("accept", ["application/json", *STREAMS])
def test_clients_that_read_nothing(application: Any, serving: Any, accept: str) -> None:
    """What they do not read counts as theirs, so it is bounded; and they hold nobody up."""
    app = application(max_count=5000, max_client=6000, batch=256)
    with serving(app) as client:
        served = Served(app, client)
        before = resident()
        with never_reads(served, accept):
            until(lambda: not app.state.engine.idle)
            while not app.state.engine.idle:
                served.serves_others()
                time.sleep(0.5)
            # all images are made, and not read
            response = client.post("/generate", json=MANY)
            assert response.status_code == 429, response.text[:100]
            assert 1 <= int(response.headers["retry-after"]) <= 3600
            served.serves_others()
            assert resident() - before < 100
        # once it has gone there is room again
        until(lambda: client.post("/generate", json=MANY).status_code == 200)


def test_one_that_takes_nothing_is_cut_off_and_one_that_takes_little_is_not(
    application: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeoutProtocol, "header_seconds", 0.5)
    monkeypatch.setattr(TimeoutProtocol, "stalled_seconds", 6.0)
    app = application(max_count=5000, batch=256)
    with serving(app) as client:
        served = Served(app, client)
        with never_reads(served, STREAMS[0]) as stuck, never_reads(served, STREAMS[0]) as slow:
            begin = time.monotonic()
            while time.monotonic() - begin < 9 or not app.state.engine.idle:
                slow.recv(8000)
                time.sleep(0.02)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            slow.settimeout(20)
            end = b""
            while not end.endswith(b"\r\n0\r\n\r\n"):
                piece = slow.recv(1 << 20)
                assert piece
                end = (end + piece)[-10:]
            stuck.settimeout(5)
            with pytest.raises(ConnectionResetError):
                rest(stuck)
        served.serves_others()


def test_a_thousand_connections(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files(4096)
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(served.connect(60)) for _ in range(1000)]
            served.serves_others()
            for number, connection in enumerate(connections):
                connection.sendall(
                    post({"count": 1}) if number % 5 == 0 else b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
                )
            served.client.get("/healthz").raise_for_status()
            for connection in connections:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            served.serves_others()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_connection_too_many(application: Any, serving: Any) -> None:
    app = application()
    with serving(app, max_connections=4) as client, ExitStack() as stack:
        served = Served(app, client)
        served.serves_others()
        held = [stack.enter_context(served.connect()) for _ in range(3)]
        served.client.get("/healthz").raise_for_status()
        for sent in (b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n", post({"count": 1})):
            with served.connect() as connection:
                connection.sendall(sent)
                answer = rest(connection)
                is_refused(answer, 503)
                assert re.search(rb"\r\nretry-after: \d+\r\n", answer, re.I)
        served.serves_others()
        held[0].close()
        until(lambda: talk(served, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200 "))
        assert 'status="503"' in client.get("/metrics").text


def test_requests_one_behind_the_other(served: Served) -> None:
    """Answers come in order, and one that is refused breaks nothing."""
    sent = [post({"count": 1, "seed": 7}), post({"count": 0}), b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"]
    with served.connect() as connection:
        connection.sendall(b"".join(sent) * 5 + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        served.serves_others()
        answer = rest(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"200", b"422", b"200"] * 5 + [b"200"]


def test_very_many_requests_one_behind_the_other(served: Served) -> None:
    """They are not read before they are answered."""
    connection = served.connect(0.5)
    with connection, pytest.raises(TimeoutError):
        while True:
            connection.sendall(post({"count": 5}) * 100)
    served.serves_others()


@pytest.mark.parametrize(
    "target",
    [
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/%2e%2e/app.py",
        "/static/..%2f..%2fpyproject.toml",
        "/static/%00",
        "/static/page.js%00.png",
        "/static/" + "a" * 5000,
        "/static/" + "a/" * 5000,
        "/static/%ff%fe",
        "//static//etc/passwd",
        "/%00",
        "/entries/%00",
        "/entries/1e9",
        "/entries/" + "9" * 5000,
        "/entries/-1",
        "/entries/0?model=" + "m" * 5000,
        "/entries/0?model=%00",
        "/" + "a" * 9000,
        "/%",
        "/%zz",
        "/generate/",
        "/v1/images/generations/../../info",
        "http://other.example/healthz",
        "http://other.example:99999/",
        "*",
    ],
    ids=lambda target: target[:30],
)
def test_paths(served: Served, target: str) -> None:
    answer = talk(served, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    is_refused(answer, 400, 404, 405, 422)
    assert len(answer) < 2000


@pytest.mark.parametrize(
    "method", ["HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "generate", "X" * 99]
)
@pytest.mark.parametrize("path", ["/", "/generate", "/healthz", "/metrics", "/static/page.js", "/nothing"])
def test_methods(served: Served, method: str, path: str) -> None:
    answer = talk(served, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert status_of(answer) in (200, 404, 405)
    if method == "HEAD":
        assert answer.endswith(b"\r\n\r\n")
    if status_of(answer) == 405:
        assert re.search(rb"\r\nallow: \w+", answer, re.I)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 500_000, 422),
        (b'{"count":' * 100_000, 422),
        (b'{"count": ' + b"[" * 180 + b"]" * 180 + b"}", 422),
        (b'{"count": ' + b"1" * 1_000_000 + b"}", 422),
        (b'{"count": 1e' + b"9" * 100_000 + b"}", 422),
        (b'{"count": -0}', 422),
        (b'{"count": 1, "seed": 1e400}', 422),
        (b'{"count": 1, "labels": [' + b"1.5," * 250_000 + b"1]}", 422),
        (b'{"count": 1, "labels": [' + b"1," * 500_000 + b"1]}", 422),
        (b'{"count": 1, "labels": ["' + b"a" * 1_000_000 + b'"]}', 422),
        (b"{" + b",".join(b'"%d":1' % number for number in range(90_000)) + b"}", 422),
        (b"{" + b'"count":9999999,' * 60_000 + b'"count":1}', 200),
        (b'{"count":1,"count":9999999}', 422),
        (b'{"\\u0000": 1, "count": 1}', 422),
        (b'{"count": 1}' + b" " * 1_000_000, 200),
        (b"\xef\xbb\xbf" + b'{"count": 1}', 422),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else str(value),
)
def test_json_bombs(served: Served, body: bytes, status: int) -> None:
    """None takes long: the event loop reads them, and others wait for it."""
    begin = time.monotonic()
    response = served.client.post("/generate", content=body, headers={"Content-Type": "application/json"})
    seconds = time.monotonic() - begin
    assert response.status_code == status, response.text[:300]
    assert status == 200 or len(response.content) < 1000
    assert seconds < 2
    assert not TELLTALE.search(response.content.lower()) or status == 200


def test_all_at_once(served: Served) -> None:
    """Rude clients by the dozen, and one that means well is served all the while."""

    def rude(number: int) -> None:
        with served.connect() as connection:
            accept = STREAMS[number % 3]
            # all twenty of them together are below the limit of one client, for the good one is the same to the server
            connection.sendall([post({"count": 500}, f"Accept: {accept}"), b"GET /\r\n\r\n", b"POST /gen"][number % 3])
            time.sleep(0.2 * (number % 5))

    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(rude, number) for number in range(60)]
        while not all(one.done() for one in running):
            served.serves_others()
        for one in running:
            one.result()
