"""A soak test: a real `rapid serve` under mixed load for minutes, with memory, files, threads and queue every second.

Clients request a few images, abort large streams, send invalid requests and bytes that are not HTTP, read slowly or not
at all, fetch zips, and hold idle connections. It fails (exit 1) if memory in the last third is more than 5 % above the
middle third, if a response is a 5xx other than a 503 with Retry-After, if images are left in the engine after the load,
or if a repeated seed gives other pixels (more than 1 of 255). Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from commands import at_least, told
from PIL import Image, ImageDraw, ImageFont
from soak_clients import CLIENTS, Client, Load

from rapid.methods import open_generator

START_SECONDS = 180
END_SECONDS = 60
GROWTH, ONCE = 1.05, 64
"""Memory may grow by this factor, or by this many MiB: the largest step so far may allocate them, once."""
PAGE = os.sysconf("SC_PAGE_SIZE")
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


class SoakError(Exception):
    """The test cannot run; the message is for the user."""


class Sample(NamedTuple):
    """The server at one moment."""

    seconds: float
    rss_mib: float
    files: int
    threads: int
    queue: float


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
    with told("soak"):
        # a bundle that makes no images is served, too
        open_generator(options.model, "cpu")
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
    parser.add_argument(
        "--minutes", type=at_least(0.05), default=10, metavar="M", help="duration of the load; default: 10"
    )
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="rows of a step; default: measured")
    parser.add_argument(
        "--large", type=at_least(1), default=5000, metavar="N", help="images of a large stream; default: 5000"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), metavar="FOLDER", help="default: runs/soak")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
