"""A training on images with a planted pattern: nothing of them is in any file, in the logs or on the terminal.

For every method: `test_all_methods.py` sees to it that `TINY` has them all.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY as METHODS
from methods.tiny import flags
from numpy.typing import NDArray
from PIL import Image
from tests_support import TINY

from rapid.methods import apply_overrides
from rapid.rounding import rounded_up
from rapid.stages.public import build_public_bundle

PROGRAM = """
import sys, numpy as np
from pathlib import Path
from rapid.dp.gradients.bookkeeper import BookKeeper
from rapid.cli import main
secret, losses, norms = Path(sys.argv[1]), [], []
clip = BookKeeper.clipped_sum
def recorded(self, compute, count, *arguments, **names):
    def computed():
        found = compute()
        alone = found.detach()
        losses.extend(alone.tolist())
        losses.extend(alone.view(count, -1).mean(1).tolist())
        return found
    found = clip(self, computed, count, *arguments, **names)
    norms.extend(found[1].detach().tolist())
    return found
BookKeeper.clipped_sum = recorded
code = main(sys.argv[2:])
np.savez(secret, losses=np.array(losses, np.float32), norms=np.array(norms, np.float32))
sys.exit(code)
"""
COUNTS = (1237, 811)
PROGRESS = re.compile(r"[a-z -]+: +\d+%\|.*\| \d+/\d+ \[[\d:]+<[\d:?]+, +[\d.?]+s?/?[a-z]+(/s)?(, epsilon [\d.]+)?\]")


@pytest.fixture(scope="module")
def pattern() -> NDArray[np.uint8]:
    return np.random.default_rng(5).integers(1, 255, 24, dtype=np.uint8)


def planted(path: Path, pattern: NDArray[np.uint8]) -> Path:
    """Noise, with the pattern in the fourth row of every image; two classes of odd sizes, in random order."""
    rng = np.random.default_rng(6)
    labels = rng.permutation(np.repeat([0, 1], COUNTS))
    images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    images[:, 3, 2:26] = pattern
    np.savez(path, images=images, labels=labels, classes=np.array(["first", "second"]))
    return path


def contents(path: Path) -> Iterator[bytes]:
    """What is in a file, and what is packed in it."""
    raw = path.read_bytes()
    yield raw
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    elif path.suffix == ".png":
        yield np.asarray(Image.open(io.BytesIO(raw))).tobytes()


def shapes_of(pattern: NDArray[np.uint8]) -> Iterator[bytes]:
    """Pieces of the pattern, as it might be written."""
    for start in range(0, len(pattern) - 8, 4):
        piece = pattern[start : start + 8]
        yield piece.tobytes()
        yield piece.tobytes().hex().encode()
        yield base64.b64encode(piece.tobytes()).rstrip(b"=")[:-1]
        for kind in (np.float32, np.float64):
            yield piece.astype(kind).tobytes()
            yield (piece.astype(kind) / 255).astype(kind).tobytes()
            yield (piece.astype(kind) / kind(127.5) - 1).astype(kind).tobytes()
        yield ", ".join(map(str, piece.tolist())).encode()


def counts_in(text: str) -> list[str]:
    """Class counts, and shares that follow from them, as they would be printed."""
    total = sum(COUNTS)
    words = [str(count) for count in COUNTS] + [f"{count:,}" for count in COUNTS]
    words += [f"{scale * count / total:.{4 - int(scale > 1)}f}" for count in COUNTS for scale in (1, 100)]
    return [word for word in words if re.search(rf"(?<![0-9a-f]){re.escape(word)}(?![0-9a-f])", text)]


def numbers_in(numbers: NDArray[np.float32], content: bytes) -> list[float]:
    """Those of `numbers` that `content` holds: as text, alone in a small piece, or several side by side.

    One of some thousand float32 among the weights of a network is found by chance in every second run, two side by
    side in none; and one of six decimals is now and then that of a public number, which are rounded to so many.
    """
    binary = np.frombuffer(content[: len(content) // 4 * 4], np.float32)
    seen = np.isin(binary, numbers)
    if len(binary) > 4:
        seen[1:-1] &= seen[2:] | seen[:-2]
        seen[[0, -1]] &= seen[[1, -2]]
    words = set(re.findall(rb"[0-9]+[.][0-9]{7,}", content))
    full = {word[:11] for word in words}
    short = {str(value).encode(): value for value in numbers}
    long = {f"{float(value):.17f}".encode()[:11]: value for value in numbers}
    return [*binary[seen].tolist(), *(short[word] for word in words & set(short)), *(long[w] for w in full & set(long))]


RELEASES = (
    "private.objective=late", "private.start=700", "private.moments.share=0.3", "private.moments.covariance=class",
    "private.moments.warmup.steps=2", "private.tones.share=0.2", "generation.retrieval=moments", "generation.start=500",
    "private.distillation={candidates: 40, rounds: 1, keep: 1, votes_share: 0.2, training: {steps: 2}}",
)  # fmt: skip
"""Each release that RAPID can have beside those of its smallest settings."""


@pytest.fixture(params=sorted([*METHODS, "rapid", "rapid-releases"]))
def task(request: pytest.FixtureRequest, letters: Path, tmp_path: Path) -> tuple[str, Path | None, list[str]]:
    """A method, its base, if it has one, and arguments with its smallest settings."""
    method: str = request.param
    if method.startswith("rapid"):
        own = [setting for setting in TINY if setting.startswith(("private", "generation"))]
        own += RELEASES if method == "rapid-releases" else ()
        method = "rapid"
        return method, request.getfixturevalue("public_bundle"), [word for one in own for word in ("--set", one)]
    tiny, base = METHODS[method], None
    if tiny["public"] is not None:
        chosen = apply_overrides(tiny["settings"] | tiny["public"] | {"method": method}, [])
        base = build_public_bundle([letters], tmp_path / "base", chosen, torch.device("cpu"), resume=False).path
    return method, base, flags(tiny["settings"])


def test_nothing_of_the_private_images_is_written(
    tmp_path: Path, task: tuple[str, Path | None, list[str]], pattern: NDArray[np.uint8]
) -> None:
    method, base, settings = task
    private = planted(tmp_path / "private.npz", pattern)
    places = {name: tmp_path / "seen" / name for name in ("home", "scratch", "work")}
    for place in places.values():
        place.mkdir(parents=True)
    environment = os.environ | {
        "HOME": str(places["home"]), "TMPDIR": str(places["scratch"]), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    environment.pop("RAPID_LEDGER", None)
    environment.pop("XDG_DATA_HOME", None)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "secret.npz"), "train-private", "--method", method]
    command += [] if base is None else ["--base", str(base)]
    command += ["--private", str(private), "--epsilon", "1", "--out", "out", *settings]
    command += ["--set", "private.expected_batch=200", "--set", "private.checkpoint_seconds=0"]
    done = subprocess.run(command, cwd=places["work"], env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    secret = np.load(tmp_path / "secret.npz")
    assert len(secret["losses"]) > 300
    assert len(secret["norms"]) > 300
    # the base is public, whatever it holds
    public = {path.stat().st_ino for path in base.rglob("*") if path.is_file()} if base else set()
    written = [p for p in (tmp_path / "seen").rglob("*") if p.is_file() and p.stat().st_ino not in public]
    # the card, the statement, the networks, the manifest, the ledger and its key
    assert len(written) > 10
    seen = [(str(path), content) for path in written for content in contents(path)]
    seen += [("stdout", done.stdout), ("stderr", done.stderr)]
    forbidden = set(shapes_of(pattern))
    numbers = np.concatenate([secret["losses"], secret["norms"]])
    numbers = np.unique(numbers[(numbers != 0) & np.isfinite(numbers)])
    for name, content in seen:
        assert not [piece for piece in forbidden if piece in content], name
        assert not numbers_in(numbers, content), name
        for count in COUNTS:
            assert np.int64(count).tobytes() not in content, name
            assert np.float64(count).tobytes() not in content, name
        if name.endswith((".json", ".jsonl", ".md", "stdout", "stderr")):
            assert not counts_in(content.decode()), name
    # the terminal says how far it is, how fast, and what was spent; a rounded loss would be a line of another form
    told = json.loads((places["work"] / "out" / "privacy.json").read_text())
    assert told["epsilon"] == pytest.approx(1, abs=2e-3)
    words = done.stdout.decode().replace(told["accountant"], "")
    epsilon, delta = rounded_up(told["epsilon"]), rounded_up(told["delta"])
    assert f"({epsilon}, {delta})-differentially private" in words
    assert set(re.findall(r"\d+[.]\d[\de-]*", words)) <= {epsilon, delta}
    for line in filter(None, re.split(r"[\r\n]+", done.stderr.decode())):
        assert PROGRESS.fullmatch(line), line


def test_the_search_finds_what_it_looks_for(tmp_path: Path, pattern: NDArray[np.uint8]) -> None:
    """It is not idle: the set itself, its latents' input and its counts are found."""
    private = planted(tmp_path / "private.npz", pattern)
    forbidden = set(shapes_of(pattern))
    found = [content for content in contents(private) if any(piece in content for piece in forbidden)]
    assert found
    unit = np.load(private)["images"].astype(np.float32) / np.float32(127.5) - 1
    assert any(piece in unit.tobytes() for piece in forbidden)
    losses = np.random.default_rng(7).gamma(2, size=1000).astype(np.float32)
    weights = np.random.default_rng(8).normal(size=10000).astype(np.float32)
    assert not numbers_in(losses, weights.tobytes())
    assert numbers_in(losses, np.r_[weights, losses[5:7], weights].astype(np.float32).tobytes()) == losses[5:7].tolist()
    assert numbers_in(losses, np.r_[weights, losses[5:7]].astype(np.float32).tobytes()) == losses[5:7].tolist()
    assert numbers_in(losses, losses[9].tobytes()) == [losses[9]]
    assert numbers_in(losses, f'{{"loss": {float(losses[9])}}}'.encode()) == [losses[9]]
    long = next(loss for loss in losses if len(str(loss)) >= 10)
    assert numbers_in(losses, f"mean loss {long}".encode()) == [long]
    assert counts_in("class first: 1,237 images")
    assert counts_in('{"share": 0.6040}')
    assert not counts_in("3f1237ab")
