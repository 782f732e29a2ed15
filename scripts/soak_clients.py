"""Clients of the soak test: good, bad, rude, slow, and idle ones; what they share, and what they found."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import socket
import struct
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

STREAMS = ("application/x-ndjson", "text/event-stream", "application/zip")

BAD_BODIES = (b"", b"[", b'{"count": 0}', b'{"count": 1e9}', b'{"count": 1, "labels": ["?"]}', b"[" * 5000, b"\xff")

RUDE = (
    b"NONSENSE\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
    b"GET /%00%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
)

Client = Callable[["Load", httpx.Client, random.Random], None]


@dataclass
class Load:
    """What the clients share, and their results."""

    host: str
    port: int
    large: int
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    statuses: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)

    def saw(self, kind: str, response: httpx.Response) -> bool:
        """Count a response; return whether its status is 200."""
        status = response.status_code
        with self.lock:
            self.requests[kind] += 1
            self.statuses[str(status)] += 1
            allowed = status == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in response.headers
            if status >= 500 and not allowed:
                self.wrong.append(f"{kind}: {status}")
            if kind in ("small", "again", "zip") and status not in (200, 429, 503):
                self.wrong.append(f"{kind}: {status} {response.headers.get('content-type')}")
        return status == httpx.codes.OK

    def broke(self, kind: str, error: Exception) -> None:
        """Count a connection that broke unexpectedly."""
        with self.lock:
            self.faults[f"{kind}: {type(error).__name__}"] += 1

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """A plain TCP connection."""
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            yield connection


def small(load: Load, client: httpx.Client, order: random.Random) -> None:
    """A few images."""
    begin = time.monotonic()
    if load.saw("small", client.post("/generate", json={"count": order.randint(1, 4)})):
        with load.lock:
            load.seconds.append(time.monotonic() - begin)


def again(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Images of a repeated seed."""
    seed = order.randrange(8)
    response = client.post("/generate", json={"count": 4, "seed": seed})
    if not load.saw("again", response):
        return
    found = [decode(base64.b64decode(image)) for image in response.json()["images"]]
    with load.lock:
        before = load.first.setdefault(seed, found)
    most = max(int(np.abs(one - other).max()) for one, other in zip(before, found, strict=True))
    if most > 1:
        with load.lock:
            load.wrong.append(f"seed {seed}: a pixel differs by {most}")


def cut(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Disconnect in the middle of a stream."""
    body, headers = {"count": load.large}, {"Accept": order.choice(STREAMS)}
    with client.stream("POST", "/generate", json=body, headers=headers) as response:
        load.saw("cut", response)
        end = time.monotonic() + order.uniform(0, 3)
        for _ in response.iter_raw():
            if time.monotonic() > end or load.stop.is_set():
                break


def reset(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Reset the connection at a random time, possibly before the response."""
    with load.connection() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(request_bytes(load.large, order.choice([*STREAMS, "application/json"])))
        load.stop.wait(order.choice([0, 0.01, 0.3, 1]))
        with load.lock:
            load.requests["reset"] += 1


def bad(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Send invalid requests."""
    headers = {"Content-Type": "application/json", "Accept": order.choice(["*/*", "text/html", "image/png"])}
    load.saw("bad", client.post("/generate", content=order.choice(BAD_BODIES), headers=headers))
    load.saw("bad", client.get(order.choice(["/nothing", "/entries/x", "/entries/-1", "/static/%00", "/generate"])))
    load.stop.wait(0.05)


def rude(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Send bytes that are not HTTP, and check the response."""
    with load.connection() as connection, suppress(OSError):
        connection.settimeout(1)
        connection.sendall(order.choice(RUDE))
        answer = connection.recv(4096)
        found = re.match(rb"HTTP/1\.1 (\d+)", answer)
        with load.lock:
            load.requests["rude"] += 1
            if found:
                load.statuses[found[1].decode()] += 1
                if found[1].startswith(b"5"):
                    load.wrong.append(f"rude: {found[1].decode()}")
    load.stop.wait(0.1)


def slow(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Read little or nothing for some seconds."""
    with load.connection() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request_bytes(load.large, order.choice(STREAMS)))
        with load.lock:
            load.requests["slow"] += 1
        end = time.monotonic() + order.uniform(2, 20)
        reads = order.random() < 0.5
        while time.monotonic() < end and not load.stop.wait(0.2):
            if reads:
                with suppress(TimeoutError):
                    connection.settimeout(0.1)
                    connection.recv(1000)


def zipped(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Fetch a zip and open it."""
    count = order.randint(1, 60)
    response = client.post("/generate", json={"count": count}, headers={"Accept": "application/zip"})
    if load.saw("zip", response):
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            if archive.testzip() is not None or len(archive.namelist()) != count:
                with load.lock:
                    load.wrong.append("zip: it is damaged")


def idle(load: Load, client: httpx.Client, order: random.Random) -> None:
    """Hold connections without sending anything."""
    held = [socket.create_connection((load.host, load.port), timeout=30) for _ in range(20)]
    with load.lock:
        load.requests["idle"] += len(held)
    load.stop.wait(order.uniform(1, 25))
    for connection in held:
        connection.close()


CLIENTS: tuple[Client, ...] = (small, small, again, again, cut, reset, bad, rude, slow, slow, zipped, idle)


def request_bytes(count: int, accept: str) -> bytes:
    """The bytes of a request."""
    body = json.dumps({"count": count}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def decode(content: bytes) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Pixels of a PNG."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image).astype(np.int16)
