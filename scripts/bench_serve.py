"""Throughput, latency and fairness of `rapid serve`, compared with `generate` alone (see scripts/bench-serve)."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from commands import at_least, told

from rapid.heap import prepare_heap
from rapid.methods import open_generator
from rapid.sampling.generate import generate
from rapid.sampling.generator import Generator

BATCHES = (32, 64, 128, 256, 512)
ROUNDS = 9
"""Of each comparison, alternating with and without a server: the speed of a machine varies within seconds."""
RUNS = 5
"""Requests per round on an idle server."""
LARGE, SMALL = 2000, 4


def bare(model: Path, batch: int) -> Generator:
    """A generator with this batch size, warmed up."""
    generator = open_generator(model, "auto", [f"generation.batch_size={batch}"])
    generate(generator, batch, seed=0)
    return generator


def bare_throughput(generator: Generator, seconds: float) -> float:
    """Images per second of `generate`."""
    made, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        generate(generator, 4 * generator.batch_size, seed=made)
        made += 4 * generator.batch_size
    return made / (time.perf_counter() - begin)


def bare_latency(generator: Generator, count: int, runs: int) -> list[float]:
    """Seconds of `generate` for `count` images, `runs` times."""
    found = []
    for seed in range(runs):
        begin = time.perf_counter()
        generate(generator, count, seed=seed)
        found.append(time.perf_counter() - begin)
    return found


@contextmanager
def server(model: Path) -> Iterator[str]:
    """A server process; yields its URL when it is ready."""
    command = [sys.executable, "-m", "rapid", "serve", "--model", str(model), "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                # the server has said in its last line what is wrong
                process.wait(30)
                said.seek(0)
                print(f"bench-serve: {said.read().strip().splitlines()[-1]}", file=sys.stderr)
                sys.exit(2)
            while httpx.get(f"{found.group()}/readyz").status_code != 200:
                time.sleep(0.1)
            yield found.group()
        finally:
            process.terminate()
            process.wait(30)


async def ask(url: str, count: int, seed: int | None = None) -> float:
    """Seconds of a request on a new connection.

    Without a client library: with hundreds of requests in flight, it would use more CPU time than the server.
    """
    address = urlsplit(url)
    body = json.dumps({"count": count, "seed": seed})
    head = f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        answer = await reader.read(-1)
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"bench-serve: {answer[:200]!r}")
    return time.perf_counter() - begin


def images_made(url: str) -> int:
    """Images that the server has made so far."""
    found = re.search(r"^rapid_images_total\{.*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return int(float(found[1])) if found else 0


async def throughput(url: str, clients: int, count: int, seconds: float) -> float:
    """Images per second with many clients, each of which sends its next request as soon as it has a response.

    Measured after each client has had one response and while all go on, so that filling and emptying the server do not
    count. Responses come in groups, so the server's own count of images is used.
    """
    answered: set[int] = set()
    warm = asyncio.Event()

    async def one(number: int) -> None:
        while True:
            await ask(url, count)
            answered.add(number)
            if len(answered) == clients:
                warm.set()

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(one(number)) for number in range(clients)]
        await warm.wait()
        begin, before = time.perf_counter(), images_made(url)
        await asyncio.sleep(seconds)
        made, end = images_made(url) - before, time.perf_counter()
        for task in asking:
            # closes the connection, which cancels the request
            task.cancel()
    return made / (end - begin)


async def one_after_the_other(url: str, count: int, runs: int) -> list[float]:
    """Seconds of each request on an otherwise idle server."""
    return [await ask(url, count, seed) for seed in range(runs)]


async def under_load(url: str, rate: float, seconds: float) -> list[float]:
    """Seconds of each request for one image, with Poisson arrivals at `rate` per second."""
    moments = random.Random(0)
    begin, asked, following = time.perf_counter(), [], 0.0
    while following < seconds:
        await asyncio.sleep(max(0, begin + following - time.perf_counter()))
        asked.append(asyncio.create_task(ask(url, 1)))
        following += moments.expovariate(rate)
    return list(await asyncio.gather(*asked))


async def beside(url: str) -> tuple[float, float]:
    """Median seconds of small requests beside a large one, and its seconds; NaN if it was over before they came."""
    large = asyncio.create_task(ask(url, LARGE))
    found = []
    await asyncio.sleep(0.5)
    while not large.done() and len(found) < 15:
        found.append(await ask(url, SMALL))
        await asyncio.sleep(0.2)
    return statistics.median(found) if found else math.nan, await large


def report(rows: list[tuple[str, str, str]]) -> None:
    """Print a table."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--seconds", type=at_least(0.5), default=30, help="under load, of a measurement or three rounds of it"
    )
    parser.add_argument("--clients", type=at_least(1), default=32)
    parser.add_argument("--images", type=at_least(1), default=16, help="per request, when measuring throughput")
    options = parser.parse_args()
    prepare_heap()
    with told("bench-serve"):
        # a bundle that makes no images is served, too
        open_generator(options.model)
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {options.model}", flush=True)
    with server(options.model) as url:
        _, batch = max((bare_throughput(bare(options.model, batch), 2), batch) for batch in BATCHES)
        print(f"bare: best with a batch of {batch}", flush=True)
        generator, rounds = bare(options.model, batch), []
        for _ in range(ROUNDS):
            alone = bare_throughput(generator, options.seconds / 3)
            rounds.append((asyncio.run(throughput(url, options.clients, options.images, options.seconds / 3)), alone))
            print(f"many clients: {rounds[-1][0]:.1f} images/s, bare {alone:.1f}", flush=True)
        served, alone = (statistics.median(column) for column in zip(*rounds, strict=True))
        low, share, high = statistics.quantiles((many / own for many, own in rounds), n=4)
        idle: dict[int, tuple[float, float]] = {}
        for count in (1, SMALL):
            pairs = []
            for _ in range(ROUNDS):
                own = bare_latency(generator, count, RUNS)
                found = asyncio.run(one_after_the_other(url, count, RUNS))
                pairs += zip(found, own, strict=True)
            idle[count] = (statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs))
        (one, bare_one), (small, bare_small) = idle[1], idle[SMALL]
        rate = 0.8 * asyncio.run(throughput(url, options.clients, 1, options.seconds / 2))
        loaded = asyncio.run(under_load(url, rate, options.seconds))
        crowded, large = asyncio.run(beside(url))
    report(
        [
            ("measurement", "served", "compared with"),
            (
                f"images per second, {options.clients} clients, {options.images} images each",
                f"{served:.1f}",
                f"{alone:.1f} bare, batch {batch}: {share:.2f} (quartiles of rounds {low:.2f}, {high:.2f})",
            ),
            ("one image, idle", f"{1e3 * one:.0f} ms", f"{1e3 * bare_one:.0f} ms bare: {one / bare_one:.2f}x"),
            (
                f"one image, at 80 % load ({rate:.1f}/s)",
                f"p50 {1e3 * float(np.quantile(loaded, 0.5)):.0f} ms",
                f"p99 {1e3 * float(np.quantile(loaded, 0.99)):.0f} ms, {len(loaded)} requests",
            ),
            (f"{SMALL} images, idle", f"{1e3 * small:.0f} ms", f"{1e3 * bare_small:.0f} ms bare"),
            (
                f"{SMALL} images beside {LARGE}",
                f"{1e3 * crowded:.0f} ms",
                f"{crowded / small:.2f}x idle; the large one took {large:.1f} s",
            ),
        ]
    )


if __name__ == "__main__":
    main()
