"""Two servers of one bundle behind nginx: one is killed under load and restarted, and every response is checked.

Each request is sent once before the load. Under load every response must have the same images, each pixel within 1 of
255. A client that gets no response tries once more.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
from commands import at_least, check_file, told
from PIL import Image

from rapid.files import write_json
from rapid.methods import open_generator

CONFIG = Path(__file__).parent.parent / "docker" / "nginx.conf"
START_SECONDS = 180
NOBODY = 65534

Json = dict[str, Any]


class ReplicasError(Exception):
    """The experiment cannot be made; the message is for the user."""


def derive(config: str, folder: Path, port: int, replicas: Sequence[str]) -> str:
    """`docker/nginx.conf` for this machine: servers, port and folder replaced, resolver removed, all else unchanged."""
    servers = "".join(f"        server {replica} max_fails=0;\n" for replica in replicas)
    for pattern, replacement in (
        (r"( *# replicas: begin\n)(?:.*\n)*?( *# replicas: end\n)", rf"\1{servers}\2"),
        (r" *resolver .*\n", ""),
        (r"listen 8080;", f"listen 127.0.0.1:{port};"),
        (r" /tmp/", f" {folder}/"),
        (r"/dev/stdout", f"{folder}/access.log"),
    ):
        config, found = re.subn(pattern, replacement, config)
        if not found:
            raise ReplicasError(f"{CONFIG}: has nothing like {pattern!r} any more")
    return config


def free_port() -> int:
    """A free port; not 0, because a restarted server needs the same one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Replica:
    """One `rapid serve` on loopback, which can be killed and restarted on the same port."""

    model: Path
    threads: int
    log: IO[bytes]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Its address for nginx."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process; it is ready when `wait` returns."""
        options = ["--model", str(self.model), "--port", str(self.port), "--device", "cpu"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rapid", "serve", *options],
            env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def wait(self) -> None:
        """Wait until it is ready."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process is None or self.process.poll() is not None:
                raise ReplicasError(f"a server ended by itself: {_last_line(self.log)}")
            try:
                if httpx.get(f"http://{self.address}/readyz", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise ReplicasError(f"a server was not ready within {START_SECONDS} s: {_last_line(self.log)}")

    def end(self, number: signal.Signals) -> None:
        """Send the signal, and wait until the process has ended."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()


@dataclass
class Tally:
    """Results of the clients."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    seconds: list[float] = field(default_factory=list)
    identical: int = 0
    images: int = 0
    retried: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, answer: Json, reference: Json, seconds: float) -> None:
        """Count a response, and compare it with the reference."""
        difference = compare(answer, reference)
        with self.lock:
            self.seconds.append(seconds)
            self.images += len(reference["images"])
            self.identical += answer["images"] == reference["images"]
            if difference is not None:
                self.wrong.append(difference)


def main() -> int:
    """Run the experiment; return 0 if no client failed and no response was wrong."""
    options = _options()
    with told("replicas"):
        if options.out is not None:
            check_file(options.out)
        # a bundle that makes no images is served, too
        open_generator(options.model, "cpu")
    try:
        report = experiment(options)
    except (ReplicasError, httpx.HTTPError) as error:
        print(f"replicas: {error}", file=sys.stderr)
        return 2
    for name, value in report.items():
        print(f"{name:>28}  {value}")
    if options.out is not None:
        write_json(options.out, report)
    return int(bool(report["failed"] or report["wrong"] or not report["after its restart"]))


def experiment(options: argparse.Namespace) -> Json:
    """Start everything, apply load, kill, restart, and report."""
    nginx = find_nginx()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapid-replicas-")))
        replicas = []
        for name in "ab":
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            replica = Replica(options.model, options.threads, log)
            stack.callback(replica.end, signal.SIGKILL)
            replica.start()
            replicas.append(replica)
        for replica in replicas:
            replica.wait()
        url = stack.enter_context(_nginx(nginx, folder / "nginx", [replica.address for replica in replicas]))
        return _load(options, url, replicas[1], folder / "nginx" / "access.log")


def find_nginx() -> str:
    """Path of nginx; Debian puts it into a folder that is not on ordinary users' PATH."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise ReplicasError("nginx is not installed: apt install nginx-light")
    return found


def make_requests(number: int, count: int, classes: Sequence[str]) -> list[Json]:
    """Requests with different seeds; every second one has labels."""
    labels = [[(seed + place) % len(classes) for place in range(count)] if classes else None for seed in range(number)]
    return [{"count": count, "seed": seed, "labels": labels[seed] if seed % 2 else None} for seed in range(number)]


def compare(answer: Json, reference: Json) -> str | None:
    """What is wrong with a response; None if its images equal the reference, each pixel within 1 of 255."""
    if [answer[key] for key in ("labels", "seed")] != [reference[key] for key in ("labels", "seed")]:
        return f"labels {answer['labels']}, seed {answer['seed']} instead of {reference['labels']}, {reference['seed']}"
    if len(answer["images"]) != len(reference["images"]):
        return f"{len(answer['images'])} images instead of {len(reference['images'])}"
    for image, expected in zip(map(decode, answer["images"]), map(decode, reference["images"]), strict=True):
        if image.shape != expected.shape:
            return f"shape {image.shape} instead of {expected.shape}"
        if (most := int(np.abs(image - expected).max())) > 1:
            return f"a pixel differs by {most}"
    return None


def decode(image: str) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Pixels of a PNG in base64."""
    with Image.open(io.BytesIO(base64.b64decode(image))) as opened:
        return np.asarray(opened).astype(np.int16)


@contextmanager
def _nginx(program: str, folder: Path, replicas: Sequence[str]) -> Iterator[str]:
    """Run nginx in `folder` in front of these replicas, without root privileges; yields its URL."""
    folder.mkdir()
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(derive(CONFIG.read_text(encoding="utf-8"), folder, port, replicas), encoding="utf-8")
    who: Json = {}
    if os.geteuid() == 0:
        folder.parent.chmod(0o711)
        os.chown(folder, NOBODY, NOBODY)
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = [program, "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", "daemon off;"]
    with (folder / "error.log").open("wb") as log, subprocess.Popen(command, stderr=log, **who) as process:
        try:
            for _ in range(50):
                if process.poll() is not None:
                    raise ReplicasError(f"nginx ended by itself: {_last_line(log)}")
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _load(options: argparse.Namespace, url: str, victim: Replica, log: Path) -> Json:
    """Apply the load; one of the two servers is down for the middle third of the time."""
    third = options.seconds / 3
    with httpx.Client(base_url=url, timeout=120) as client:
        classes = client.get("/info").raise_for_status().json()["classes"]
        requests = make_requests(options.requests, options.count, classes)
        references = [client.post("/generate", json=request).raise_for_status().json() for request in requests]
    tally = Tally()
    stop = threading.Event()
    pairs = list(zip(requests, references, strict=True))
    clients = [
        threading.Thread(target=_ask, args=(url, pairs, tally, stop, number)) for number in range(options.clients)
    ]
    before = len(_lines(log))
    start = time.monotonic()
    try:
        for client_thread in clients:
            client_thread.start()
        time.sleep(third)
        victim.end(signal.Signals[f"SIG{options.signal}"])
        gone = time.monotonic()
        time.sleep(third)
        victim.start()
        victim.wait()
        back, lines_back = time.monotonic(), len(_lines(log))
        time.sleep(third)
    finally:
        stop.set()
        for client_thread in clients:
            client_thread.join()
    seconds = time.monotonic() - start
    time.sleep(0.5)  # until nginx has written its last lines
    lines = _lines(log)
    return {
        "clients": options.clients,
        "requests": len(tally.seconds) + len(tally.failed),
        "images": tally.images,
        "failed": len(tally.failed),
        "wrong": len(tally.wrong),
        "byte-identical": tally.identical,
        "retried by a client": len(tally.retried),
        "retried by nginx": sum("," in line["replica"] for line in lines[before:]),
        "of these cut short": sum(map(_broken_off, lines[before:])),
        "served by the killed one": sum(_responder(line) == victim.address for line in lines[before:]),
        "after its restart": sum(_responder(line) == victim.address for line in lines[lines_back:]),
        "seconds": round(seconds, 1),
        "seconds it was down": round(back - gone, 1),
        "seconds per request": _quantiles(tally.seconds),
        "faults": dict(Counter(tally.failed + tally.wrong + tally.retried).most_common(5)),
    }


def _ask(url: str, pairs: Sequence[tuple[Json, Json]], tally: Tally, stop: threading.Event, number: int) -> None:
    """A client: one request after the other, with one retry."""
    order = random.Random(number)
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            request, reference = order.choice(pairs)
            start = time.monotonic()
            for attempt in (1, 2):
                try:
                    answer = client.post("/generate", json=request).raise_for_status().json()
                except (httpx.HTTPError, ValueError) as error:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    with tally.lock:
                        (tally.retried if attempt == 1 else tally.failed).append(reason)
                    time.sleep(0.2)
                else:
                    tally.add(answer, reference, time.monotonic() - start)
                    break


def _last_line(log: IO[bytes]) -> str:
    return (Path(log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]


def _lines(log: Path) -> list[Json]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def _responder(line: Json) -> str:
    """The replica that responded, by a line of the log: the last one."""
    return str(line["replica"]).split(", ")[-1]


def _broken_off(line: Json) -> bool:
    """Whether a replica worked on the request for a while, and then failed."""
    statuses, seconds = (str(line[key]).split(", ")[:-1] for key in ("replica_status", "replica_seconds"))
    return any(status == "502" and float(spent) > 0.01 for status, spent in zip(statuses, seconds, strict=True))


def _quantiles(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "too few to tell"
    cuts = statistics.quantiles(seconds, n=100)
    return f"half within {cuts[49]:.2f}, 95 % within {cuts[94]:.2f}, all within {max(seconds):.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/replicas", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the bundle to serve")
    parser.add_argument("--clients", type=at_least(1), default=8, metavar="N", help="concurrent clients; default: 8")
    parser.add_argument("--requests", type=at_least(1), default=24, metavar="N", help="distinct requests; default: 24")
    parser.add_argument("--count", type=at_least(1), default=4, metavar="N", help="images in a request; default: 4")
    parser.add_argument(
        "--seconds", type=at_least(0.5), default=60, metavar="S", help="load without start-up; default: 60"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, metavar="N", help="cores of each server; default: 1")
    parser.add_argument(
        "--signal", choices=("KILL", "TERM"), default="KILL", help="signal that ends the server; default: KILL"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
