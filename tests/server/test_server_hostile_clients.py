"""Clients that go, read nothing, take all connections, or ask for very much."""

from __future__ import annotations

import re
import resource
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rapid_server.connections import EXCESS_SECONDS, SPARE, TimeoutProtocol
from rapid_server.run import allow_files
from tests_hostile import Served, is_refused, post, rest, status_of, talk, until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


STREAMS = ["application/x-ndjson", "text/event-stream", "application/zip"]

MANY = {"count": 5000, "steps": 1}


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
    answer = talk(served, 3 * post({"count": 2}) + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 4
    # the last is over, so the connection is, at once and not when it is seen to be idle
    begin = time.monotonic()
    assert talk(served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").count(b"HTTP/1.1 200 ") == 1
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
                    post({"count": 1}) if number % 5 == 0 else b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
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
        for sent in (b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n", post({"count": 1})):
            with served.connect() as connection:
                connection.sendall(sent)
                answer = rest(connection)
                is_refused(answer, 503)
                assert re.search(rb"\r\nretry-after: \d+\r\n", answer, re.I)
        # else an orchestrator would restart it
        healthy = talk(served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert healthy.startswith(b"HTTP/1.1 200 ")
        assert re.search(rb"\r\nconnection: close\r\n", healthy, re.I)
        served.serves_others()
        held[0].close()
        until(lambda: talk(served, b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200 "))
        assert 'status="503"' in client.get("/metrics").text


def test_far_too_many_silent_connections(application: Any, serving: Any) -> None:
    """Some are told so, others are reset before they take all file descriptors."""
    app = application()
    with serving(app, max_connections=4) as client, ExitStack() as stack:
        served = Served(app, client)
        connections = [stack.enter_context(served.connect(20)) for _ in range(SPARE + 30)]
        begin = time.monotonic()
        reset = 0
        for connection in connections[4:]:
            try:
                connection.sendall(b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n")
                reset += not connection.recv(100)
            except ConnectionError:
                reset += 1
        assert 20 <= reset <= 30
        assert time.monotonic() - begin < 15
        # a silent one beyond the limit is closed soon
        silent = stack.enter_context(served.connect(2 * EXCESS_SECONDS + 5))
        begin = time.monotonic()
        rest(silent)
        assert time.monotonic() - begin < 2 * EXCESS_SECONDS + 4
        for connection in connections:
            connection.close()
        until(lambda: talk(served, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200 "))


def test_requests_one_behind_the_other(served: Served) -> None:
    """Answers come in order, and one that is refused breaks nothing."""
    sent = [post({"count": 1, "seed": 7}), post({"count": 0}), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    with served.connect() as connection:
        connection.sendall(b"".join(sent) * 5 + b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        served.serves_others()
        answer = rest(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"200", b"422", b"200"] * 5 + [b"200"]


def test_very_many_requests_one_behind_the_other(served: Served) -> None:
    """They are not read before they are answered."""
    connection = served.connect(0.5)
    with connection, pytest.raises(TimeoutError):
        while True:
            connection.sendall(post({"count": 5, "steps": 1}) * 100)
    served.serves_others()


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
