"""The process of `rapid serve`: port, one line, signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from rapid_server.run import listen, serve, serve_models
from rapid_server.settings import ServerSettings
from tests_process import Program, run
from tests_support import Fails

from rapid.errors import InputError, RapidError
from rapid.sampling.generator import Generator


def command(bundle: Path, port: int) -> list[object]:
    return ["serve", "--model", bundle, "--device", "cpu", "--port", port]


def settings(bundle: Path, port: int) -> ServerSettings:
    return ServerSettings(model=(str(bundle),), port=port, device="cpu")


@contextmanager
def process(bundle: Path, **variables: str) -> Iterator[tuple[Program, str, str]]:
    """A server process, the line that it printed, and its address."""
    with Program(*command(bundle, 0), env=os.environ | variables) as server:
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, server.communicate()
        yield server, line, found.group()


def until_ready(url: str) -> None:
    """The first image takes a while."""
    begin = time.monotonic()
    while httpx.get(f"{url}/readyz").status_code != 200:
        assert time.monotonic() - begin < 60
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal(private_bundle: Path, sent: signal.Signals) -> None:
    with process(private_bundle) as (server, line, url):
        assert re.fullmatch(rf"serving {private_bundle.name} at http://127\.0\.0\.1:\d+\n", line)
        until_ready(url)
        assert httpx.post(f"{url}/generate", json={"count": 1}, timeout=60).status_code == 200
        server.send_signal(sent)
        out, err = server.communicate(timeout=30)
        assert (server.returncode, out) == (0, "")
        # the settings, and a line for each request
        assert f'model: ["{private_bundle}"] (flag)' in err
        assert "batch: null (default)" in err
        assert len(re.findall(r"client=\S+ method=POST path=/generate status=200", err)) == 1
        assert "Traceback" not in err


def test_a_signal_while_images_are_made(private_bundle: Path) -> None:
    with process(private_bundle) as (server, _, url), ThreadPoolExecutor() as pool:
        until_ready(url)
        running = pool.submit(httpx.post, f"{url}/generate", json={"count": 10000}, timeout=60)
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert running.result().status_code in (200, 503)
        _, err = server.communicate(timeout=30)
        assert time.monotonic() - start < 15
        assert server.returncode == 0
        assert "Traceback" not in err


def test_a_short_request_ends_although_the_server_stops(private_bundle: Path) -> None:
    with process(private_bundle) as (server, _, url), ThreadPoolExecutor() as pool:
        until_ready(url)
        running = pool.submit(httpx.post, f"{url}/generate", json={"count": 60}, timeout=60)
        time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        assert running.result().status_code == 200
        server.communicate(timeout=30)
        assert server.returncode == 0


def test_one_that_never_ends_its_request_is_let_go(private_bundle: Path) -> None:
    """And others are answered meanwhile."""
    with process(private_bundle) as (_, _, url):
        until_ready(url)
        host, port = url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
            for connection in slow:
                connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\n")
            assert httpx.post(f"{url}/generate", json={"count": 1}, timeout=30).status_code == 200
            slow[0].settimeout(60)
            assert slow[0].recv(100) == b""


def test_a_body_that_is_not_complete_when_the_server_stops(private_bundle: Path) -> None:
    """Both forms of an error, and no traceback."""
    with process(private_bundle, RAPID_SERVE_GRACE_SECONDS="1") as (server, _, url), ExitStack() as stack:
        until_ready(url)
        host, port = url.removeprefix("http://").split(":")
        paths = ("/generate", "/v1/images/generations")
        sent = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in paths]
        for connection, path in zip(sent, paths, strict=True):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head.encode() + b'Content-Length: 20\r\n\r\n{"n"')
        # both are waited for once a later request is answered
        assert httpx.get(f"{url}/healthz").status_code == 200
        server.send_signal(signal.SIGTERM)
        forms = (b'{"detail":"the server is stopping"}', b'{"error":{"message":"the server is stopping"')
        for connection, form in zip(sent, forms, strict=True):
            with connection.makefile("rb") as answer:
                text = answer.read()
            assert text.startswith(b"HTTP/1.1 503 "), text
            assert form in text
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 0
        assert "Traceback" not in errors


def test_an_altered_knowledge_base_ends_the_server(private_bundle: Path, tmp_path: Path) -> None:
    """Its values are read while the server runs."""
    copy = Path(shutil.copytree(private_bundle, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")))
    values = copy / "knowledge_base" / "values.npy"
    content = values.read_bytes()
    values.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = run(*command(copy, 0))
    assert done.returncode == 2
    assert "values.npy: is missing or was altered; copy the bundle again" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_that_cannot_be_run_end_the_server(generator: Generator, private_bundle: Path) -> None:
    """So that Compose or Kubernetes starts it again."""
    broken = Fails(generator)
    broken.failing = True
    with listen("127.0.0.1", 0) as listener, pytest.raises(RapidError, match="start the server again") as error:
        serve_models({"broken": broken}, settings(private_bundle, 0), listener)
    assert error.value.exit_code == 1


def test_port_in_use(private_bundle: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = run(*command(private_bundle, port))
    assert done.returncode == 2
    assert f"--port {port}: in use on 127.0.0.1; choose another" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_port_is_taken_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(InputError, match=r"port \d+: in use"):
        serve(settings(tmp_path / "missing", taken.getsockname()[1]))


def test_a_missing_model_gives_the_port_back(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with pytest.raises(InputError):
        serve(settings(tmp_path / "missing", port))
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", -1, r"port -1: choose one in 0\.\.65535"),
        ("127.0.0.1", 65536, r"port 65536: choose one in 0\.\.65535"),
        ("192.0.2.1", 0, r"host 192\.0\.2\.1: not an address of this machine"),
        ("no such host", 0, "host no such host: no such address"),
        ("a" * 70 + ".example", 0, "host a+.example: no such address"),
    ],
)
def test_a_bad_address_is_told(host: str, port: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        listen(host, port)


def test_a_port_just_left_is_free_again() -> None:
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = listener.accept()
            accepted.close()  # this side closes first, and lingers in TIME_WAIT
            assert client.recv(1) == b""
    listen("127.0.0.1", address[1]).close()
