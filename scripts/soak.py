"""A soak test: a real `rapid serve` under mixed load for minutes, with memory, files, threads and queue every second.

Clients request a few images, abort large streams, send invalid requests and bytes that are not HTTP, read slowly or not
at all, fetch zips, and hold idle connections. It fails (exit 1) if memory in the last third is more than 5 % above the
middle third, if a response is a 5xx other than a 503 with Retry-After, if images are left in the engine after the load,
or if a repeated seed gives other pixels (more than 1 of 255). Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image, ImageDraw, ImageFont

START_SECONDS = 180
END_SECONDS = 60
GROWTH, ONCE = 1.05, 64
"""Memory may grow by this factor, or by this many MiB: the largest step so far may allocate them, once."""
PAGE = os.sysconf("SC_PAGE_SIZE")
STREAMS = ("application/x-ndjson", "text/event-stream", "application/zip")
BAD_BODIES = (b"", b"[", b'{"count": 0}', b'{"count": 1e9}', b'{"count": 1, "labels": ["?"]}', b"[" * 5000, b"\xff")
RUDE = (
    b"NONSENSE\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
    b"GET /%00%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
)
KINDS: dict[str, str] = {
    "small": "a few images as JSON, with a random seed",
    "again": "a few images with one of eight seeds, compared with the first time",
    "cut": "a stream of thousands of images that the client aborts",
    "reset": "the same, with a connection reset",
    "bad": "invalid requests",
    "rude": "bytes that are not HTTP",
    "slow": "a stream that is read slowly or not at all",
    "zip": "a zip that is read completely and opened",
    "idle": "connections that do nothing",
}

Json = dict[str, Any]
Client = Callable[["Load", httpx.Client, random.Random], None]


class SoakError(Exception):
    """The test cannot run; the message is for the user."""


class Sample(NamedTuple):
    """The server at one moment."""

    seconds: float
    rss_mib: float
    files: int
    threads: int
    queue: float


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
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def decode(content: bytes) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Pixels of a PNG."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image).astype(np.int16)


def sample(process: subprocess.Popen[bytes], client: httpx.Client, begin: float) -> Sample:
    """Measure the server."""
    folder = Path(f"/proc/{process.pid}")
    pages = int((folder / "statm").read_text().split()[1])
    threads = len(list((folder / "task").iterdir()))
    files = len(list((folder / "fd").iterdir()))
    return Sample(round(time.monotonic() - begin, 2), pages * PAGE / 2**20, files, threads, queued(client))


def queued(client: httpx.Client) -> float:
    """Images in the engine, as /metrics tells."""
    found = re.search(r"^rapid_queue_images (\S+)", client.get("/metrics").raise_for_status().text, re.M)
    if found is None:
        raise SoakError("/metrics has no rapid_queue_images")
    return float(found[1])


def find_faults(samples: list[Sample], load: Load, left: float) -> list[str]:
    """What is wrong; empty if nothing is."""
    third = len(samples) // 3
    middle, last = (
        statistics.median(one.rss_mib for one in part) for part in (samples[third : 2 * third], samples[2 * third :])
    )
    found = []
    if last > max(GROWTH * middle, middle + ONCE):
        found.append(f"memory grows: {last:.0f} MiB in the last third, {middle:.0f} MiB in the middle one")
    if left:
        found.append(f"{left:.0f} images are left in the engine after the load")
    found += [f"{words} ({times} times)" for words, times in Counter(load.wrong).most_common(10)]
    return found


def plot(samples: list[Sample], path: Path) -> None:
    """Draw memory and queue over time as a PNG; the project does not depend on a plotting library."""
    width, height, edge = 900, 420, 60
    font = ImageFont.load_default(13)
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    end = max(one.seconds for one in samples)
    draw.text((edge, 8), "resident memory in MiB (black, left) and queued images (grey, right)", "black", font)
    draw.rectangle((edge, 30, width - edge, height - 40), outline="black")
    columns = (
        ("#999999", [one.queue for one in samples], "right"),
        ("black", [one.rss_mib for one in samples], "left"),
    )
    for colour, values, side in columns:
        top = 1.1 * max(*values, 1)
        points = [
            (edge + one.seconds / end * (width - 2 * edge), height - 40 - value / top * (height - 70))
            for one, value in zip(samples, values, strict=True)
        ]
        draw.line(points, colour, 2)
        for share in (0, 0.5, 1):
            place = (edge - 6, "rm") if side == "left" else (width - edge + 6, "lm")
            at = (place[0], height - 40 - share * (height - 70))
            draw.text(at, f"{share * top:.0f}", colour, font, anchor=place[1])
    for share in (0, 0.25, 0.5, 0.75, 1):
        draw.text((edge + share * (width - 2 * edge), height - 34), f"{share * end:.0f} s", "black", font, anchor="ma")
    sheet.save(path)


def run(options: argparse.Namespace) -> tuple[Json, list[str]]:
    """Start a server, load and measure it; return the report and what is wrong."""
    command = [sys.executable, "-m", "rapid", "serve", "--model", str(options.model), "--port", "0", "--device", "cpu"]
    if options.batch is not None:
        command += ["--batch", str(options.batch)]
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        (options.out / "server.log").open("w+b") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(rb"http://(\S+):(\d+)", process.stdout.readline())
            if found is None:
                log.seek(0)
                raise SoakError(f"the server did not start: {log.read().decode(errors='replace')[-300:]}")
            load = Load(found[1].decode(), int(found[2]), options.large)
            with httpx.Client(base_url=f"http://{load.host}:{load.port}", timeout=60) as client:
                _until_ready(client)
                samples = _watch(process, client, load, 60 * options.minutes)
                left = _settle(client)
                metrics = client.get("/metrics").text
                samples_after = sample(process, client, time.monotonic())
            process.send_signal(signal.SIGTERM)
            status = process.wait(END_SECONDS)
        finally:
            process.kill()
        log.seek(0)
        text = log.read().decode(errors="replace")
    wrong = find_faults(samples, load, left)
    if status:
        wrong.append(f"the server ended with {status}")
    if traces := text.count("Traceback (most recent call last)"):
        wrong.append(f"{traces} tracebacks in the log: {_first_traceback(text)}")
    images = re.search(r"^rapid_images_total\{.*\} (\S+)", metrics, re.M)
    plot(samples, options.out / "soak.png")
    report: Json = {
        "minutes": options.minutes,
        "images": 0 if images is None else int(float(images[1])),
        "statuses": dict(sorted(load.statuses.items())),
        "requests": dict(load.requests),
        "broke off": dict(load.faults),
        "seconds of a small request": _quantiles(load.seconds),
        "after the load": samples_after._asdict() | {"seconds": None},
        "wrong": wrong,
        "samples": [one._asdict() for one in samples],
    }
    (options.out / "soak.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report, wrong


def main() -> int:
    """Run and print; return 0 if nothing is wrong, 1 if something is, 2 if the test cannot run."""
    options = _options()
    try:
        report, wrong = run(options)
    except (SoakError, OSError, httpx.HTTPError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    for line in _table(report["samples"]):
        print(line)
    for key in ("images", "statuses", "requests", "broke off", "seconds of a small request", "after the load"):
        print(f"{key}: {report[key]}")
    for words in wrong:
        print(f"WRONG: {words}")
    print(f"{options.out}: soak.json, soak.png, server.log")
    return 1 if wrong else 0


def _until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + START_SECONDS
    while client.get("/readyz").status_code != httpx.codes.OK:
        if time.monotonic() > end:
            raise SoakError(f"the server was not ready within {START_SECONDS} s")
        time.sleep(0.1)


def _watch(process: subprocess.Popen[bytes], client: httpx.Client, load: Load, seconds: float) -> list[Sample]:
    """Run the load, one thread per client, and measure the server every second."""
    clients = [threading.Thread(target=_work, args=(load, one, number)) for number, one in enumerate(CLIENTS)]
    begin = time.monotonic()
    samples: list[Sample] = []
    try:
        for one in clients:
            one.start()
        while (passed := time.monotonic() - begin) < seconds:
            if process.poll() is not None:
                raise SoakError(f"the server ended by itself: {process.returncode}")
            samples.append(sample(process, client, begin))
            time.sleep(max(0.0, min(1, seconds / 10) - (time.monotonic() - begin - passed)))
    finally:
        load.stop.set()
        for one in clients:
            one.join()
    return samples


def _work(load: Load, client: Client, number: int) -> None:
    order = random.Random(number)
    with httpx.Client(base_url=f"http://{load.host}:{load.port}", timeout=60) as connection:
        while not load.stop.is_set():
            try:
                client(load, connection, order)
            except (httpx.HTTPError, OSError) as error:
                load.broke(client.__name__, error)
                load.stop.wait(0.1)


def _settle(client: httpx.Client) -> float:
    """Images left in the engine after it has had time to notice that the clients are gone."""
    end = time.monotonic() + 20
    while (left := queued(client)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def _table(samples: list[Json]) -> Iterator[str]:
    yield f"{'seconds':>8} {'RSS MiB':>8} {'files':>6} {'threads':>8} {'queue':>7}"
    # about twenty lines, including the last
    for one in samples[:: max(1, len(samples) // 20)] + samples[-1:]:
        yield (f"{one['seconds']:8.0f} {one['rss_mib']:8.1f} {one['files']:6d} {one['threads']:8d} {one['queue']:7.0f}")


def _quantiles(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "too few to tell"
    cuts = statistics.quantiles(seconds, n=100)
    return f"half within {cuts[49]:.2f}, 95 % within {cuts[94]:.2f}, all within {max(seconds):.2f}"


def _first_traceback(text: str) -> str:
    """The exception of the first traceback in a log."""
    lines = text[text.index("Traceback (most recent call last)") :].splitlines()
    return next((line for line in lines[1:] if line and not line.startswith(" ")), "")[:200]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the bundle to serve")
    parser.add_argument("--minutes", type=float, default=10, metavar="M", help="duration of the load; default: 10")
    parser.add_argument("--batch", type=int, metavar="N", help="rows of a step; default: measured")
    parser.add_argument("--large", type=int, default=5000, metavar="N", help="images of a large stream; default: 5000")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), metavar="FOLDER", help="default: runs/soak")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
