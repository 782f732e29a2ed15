"""Memory and time of the public and the private stage on sets larger than memory (see scripts/bench-memory).

Both sets are WebDataset tars, written in parts. Networks are tiny and train for two steps, so what is left is what
grows with the images: reading, latents, probe features, knowledge base. Two figures of memory are told of the process:

- all: the largest resident memory, by the kernel (VmHWM). It contains pages of mapped files that were read, which the
  system takes back when it needs them.
- own: the largest resident memory without mapped files (RssAnon), read ten times a second. This is what must be there.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from commands import at_least
from numpy.typing import NDArray

from rapid.files import replacing, write_json
from rapid.pictures import encode_png

SIDE, CELLS, CLASSES = 32, 4, 10
PART = 50_000
"""Images in a tar."""
BLOCK = 1_000
"""Images in memory at a time."""
INTERVAL = 0.1
"""Seconds between two readings of the memory."""
BUILD, TRAIN = "build-kb", "train-private"
RESULTS, TABLE = "results.json", "table.md"
TINY = [
    "autoencoder.latent_channels=4",
    "autoencoder.channels=8",
    "autoencoder.training.steps=2",
    "denoiser.channels=8",
    "denoiser.heads=2",
    "denoiser.training.steps=2",
    "encoder.channels=8",
    "encoder.training.steps=2",
    "probe.channels=4",
    "probe.features=32",
    "probe.training.steps=2",
]
PUBLIC = [*TINY, "image.channels=3", "split.reference=0.5", "knowledge_base.index_type=ivf"]
PRIVATE = [
    "private.probe.steps=2",
    "private.expected_batch=64",
    "private.steps=2",
    # it compares each private image with each public one
    "private.overlap.share=0",
]
"""Overrides of the preset `demo`. Half of the public images are in the knowledge base."""


def write_images(folder: Path, count: int, seed: int) -> None:
    """Write `count` images of coarse colours with labels, as tars of a new folder; the same for the same seed."""
    folder.mkdir(parents=True)
    for first in range(0, count, PART):
        with tarfile.open(folder / f"part-{first // PART:04}.tar", "w") as archive:
            for start in range(first, min(first + PART, count), BLOCK):
                images = made_up(min(BLOCK, count - start), [seed, start])
                for number, image in enumerate(images, start):
                    _add(archive, f"{number:08}.png", encode_png(image))
                    _add(archive, f"{number:08}.cls", str(number % CLASSES).encode())


def made_up(count: int, seed: Sequence[int]) -> NDArray[np.uint8]:
    """Images of CELLS x CELLS random colours, uint8 (count, SIDE, SIDE, 3)."""
    colours = np.random.default_rng(seed).integers(0, 256, (count, CELLS, CELLS, 3), np.uint8)
    return colours.repeat(SIDE // CELLS, 1).repeat(SIDE // CELLS, 2)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
    # a tar remembers all its members
    archive.members.clear()


def measured(arguments: Sequence[object]) -> dict[str, float]:
    """Memory, wall time and processor time of `rapid ARGUMENTS`; ends this process if the command fails."""
    command = [sys.executable, "-m", "rapid", *map(str, arguments)]
    before, begin = _processor_seconds(), time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr)
    largest = {"VmHWM": 0, "RssAnon": 0}
    while process.poll() is None:
        for name, found in _memory(process.pid).items():
            largest[name] = max(largest[name], found)
        time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit(f"bench-memory: {' '.join(command)} failed")
    return {
        "all_bytes": largest["VmHWM"],
        "own_bytes": largest["RssAnon"],
        "seconds": time.monotonic() - begin,
        "processor_seconds": _processor_seconds() - before,
    }


def _memory(pid: int) -> dict[str, int]:
    """VmHWM and RssAnon of a process, bytes; empty once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = re.findall(r"^(VmHWM|RssAnon):\s+(\d+) kB", status, re.MULTILINE)
    return {name: 1024 * int(number) for name, number in found}


def _processor_seconds() -> float:
    """Time of all processors in processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(scratch: Path, images: int) -> dict[str, dict[str, float]]:
    """Write the sets into a folder, run both commands there, and tell what they needed."""
    for seed, name in enumerate(("public", "private")):
        print(f"writing {images:,} {name} images", file=sys.stderr, flush=True)
        write_images(scratch / name, images, seed)
    base = scratch / "base"
    build = [BUILD, "--preset", "demo", "--public", scratch / "public", "--out", base, *_flags(PUBLIC)]
    train = [TRAIN, "--base", base, "--private", scratch / "private", "--classes", ",".join(map(str, range(CLASSES)))]
    train += ["--epsilon", 1, "--out", scratch / "model", "--ledger", scratch / "ledger.jsonl", *_flags(PRIVATE)]
    return {str(command[0]): measured([*command, "--device", "cpu"]) for command in (build, train)}


def _flags(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The figures as a table, Markdown."""
    lines = ["| images | command | memory, own | memory, all | time | of processors |", "|---|---|---|---|---|---|"]
    for images in sorted(results, key=int):
        for command, found in results[images].items():
            own, everything = found["own_bytes"] / 1e9, found["all_bytes"] / 1e9
            lines.append(
                f"| {int(images):,} | `{command}` | {own:.2f} GB | {everything:.2f} GB | {found['seconds']:,.0f} s "
                f"| {found['processor_seconds']:,.0f} s |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure one size, and write figures and table beside those of other sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--images", type=at_least(100), default=1_000_000, metavar="N", help="of each set; default: a million"
    )
    parser.add_argument(
        "--limit", type=at_least(0.0), default=4.0, metavar="GB", help="most memory, of all; default: 4"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/memory"), metavar="DIR")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="for sets and bundles; default: the system's own")
    options = parser.parse_args()
    if not Path("/proc/self/status").is_file():
        parser.error("memory is read from /proc, which only Linux has")
    scratch = Path(tempfile.mkdtemp(prefix="rapid-memory-", dir=options.scratch))
    try:
        figures = measure(scratch, options.images)
    finally:
        shutil.rmtree(scratch)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / RESULTS
    results: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text()) if path.is_file() else {}
    results[str(options.images)] = figures
    write_json(path, results)
    with replacing(options.out / TABLE) as target:
        target.write_text(table(results))
    print(table(results))
    largest = max(found["all_bytes"] for found in figures.values())
    if largest > options.limit * 1e9:
        raise SystemExit(f"bench-memory: {largest / 1e9:.2f} GB, more than --limit {options.limit:g}")


if __name__ == "__main__":
    main()
