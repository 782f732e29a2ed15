"""The health checks of containers, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
DEAD = "http://127.0.0.1:9"
"""Nothing listens on the port for discarded data."""


class Ready(BaseHTTPRequestHandler):
    """Answers as `/readyz` does, by the attribute `status` of the server."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/readyz" else 404)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def ready() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=server.serve_forever).start()
    yield server
    server.shutdown()
    server.server_close()


def code_of(name: str, port: int) -> str:
    """The Python code of a check, for a server at `port`."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    if name.endswith(".Dockerfile"):
        found = re.search(r"^ *CMD (\[\"python\", \"-c\", .*\])$", text, re.M)
        assert found
        return str(json.loads(found[1])[2])
    test = yaml.safe_load(text)["services"]["rapid"]["healthcheck"]["test"]
    assert test[:3] == ["CMD", "python", "-c"]
    return str(test[3]).replace(":8000", f":{port}")


@pytest.mark.parametrize("name", ["cpu.Dockerfile", "gpu.Dockerfile", "compose.yaml"])
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_no_proxy_comes_between(ready: HTTPServer, name: str, status: int, healthy: bool) -> None:
    """Docker gives containers the proxy of its own settings; the check is about the container itself."""
    ready.status = status  # type: ignore[attr-defined]
    proxies = {"http_proxy": DEAD, "HTTP_PROXY": DEAD, "RAPID_SERVE_PORT": str(ready.server_port)}
    done = subprocess.run(
        [sys.executable, "-c", code_of(name, ready.server_port)],
        env=os.environ | proxies,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode == 0) == healthy, done.stderr
