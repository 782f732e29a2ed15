"""Clients that mean harm, or know no better, over real sockets: each is answered or let go, and others are served."""

from __future__ import annotations

import re
import time

import pytest
from tests_hostile import TELLTALE, Served, is_refused, rest, status_of, talk
from tests_support import numbers

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n: empty\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
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
    assert status_of(talk(served, f"GET /healthz HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())) == 200


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
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + head + b"\r\n\r\n")
        served.serves_others()
        # by h11 if it came in parts, by LimitHead if at once
        is_refused(rest(connection), 400, 431)
    with served.connect() as connection:
        connection.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        is_refused(rest(connection), 400, 431)


def test_a_long_accept_that_is_still_a_head(served: Served) -> None:
    types = ", ".join(f"a{number}/b;q=0.{number}" for number in range(700))
    assert served.client.post("/generate", json={"count": 1}, headers={"Accept": types}).status_code == 406
    accept = {"Accept": types + ", image/png;q=0.001"}
    assert served.client.post("/generate", json={"count": 1}, headers=accept).headers["content-type"] == "image/png"


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
    answer = talk(served, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    is_refused(answer, 400, 404, 405, 422)
    assert len(answer) < 2000


@pytest.mark.parametrize(
    "method", ["HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "generate", "X" * 99]
)
@pytest.mark.parametrize("path", ["/", "/generate", "/healthz", "/metrics", "/static/page.js", "/nothing"])
def test_methods(served: Served, method: str, path: str) -> None:
    answer = talk(served, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert status_of(answer) in (200, 404, 405)
    if method == "HEAD":
        assert answer.endswith(b"\r\n\r\n")
    if status_of(answer) == 405:
        assert re.search(rb"\r\nallow: \w+", answer, re.I)


@pytest.mark.parametrize(
    "path", ["/", "/info", "/healthz", "/metrics", "/openapi.json", "/static/page.js", "/generate"]
)
def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    """RFC 9110, section 9.3.2; also of what is not allowed."""
    counted = ("rapid_requests_total", path, "200")
    before = numbers(served.client).get(counted, 0)
    got, head = (served.client.request(method, path) for method in ("GET", "HEAD"))
    if path in ("/info", "/healthz"):
        # under its own path
        assert numbers(served.client)[counted] == before + 2
    assert head.status_code == got.status_code == (405 if path == "/generate" else 200)
    assert head.content == b""
    volatile = ("content-length", "date", "x-request-id")
    first, second = ({n: v for n, v in one.headers.items() if n not in volatile} for one in (got, head))
    assert first == second


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
