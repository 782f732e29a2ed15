"""Checks that run the commands of rapid on a device, with tiny networks, and compare their results with the CPU's."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from checks import Check, Outcome, Setup, Skipped, require

from rapid.cli import main
from rapid.data import load_images, sample_path
from rapid.methods import open_generator
from rapid.progress import hidden
from rapid.sampling.generate import generate as generate_samples

TINY = [
    "autoencoder.channels=8", "autoencoder.multipliers=[1,1,1]", "autoencoder.training.steps=20",
    "autoencoder.training.batch_size=16", "denoiser.channels=8", "denoiser.heads=2", "denoiser.training.steps=20",
    "denoiser.training.batch_size=16", "encoder.channels=8", "encoder.features=8", "encoder.training.steps=10",
    "encoder.training.batch_size=16", "probe.channels=4", "probe.features=16", "probe.training.steps=10",
    "probe.training.batch_size=16", "private.probe.steps=3", "private.expected_batch=20", "private.steps=3",
    "private.physical_batch=8",
]  # fmt: skip
"""Of RAPID, over the preset demo."""
OTHERS = {
    "dpdm": [
        "network.patch=4", "network.channels=8", "network.multipliers=[1]", "network.attention=[false]",
        "network.heads=1", "private.expected_batch=20", "private.steps=3", "private.multiplicity=2",
        "private.physical_batch=16", "generation.steps=3", "generation.batch_size=16",
    ],
    "dp-gan": [
        "discriminator.channels=4", "generator.channels=4", "generator.latent=8", "private.expected_batch=20",
        "private.steps=6", "private.physical_batch=16",
    ],
    "dp-classifier": [
        "network.depth=10", "network.width=1", "network.groups=4", "network.stride=2", "private.expected_batch=20",
        "private.steps=3", "private.multiplicity=2", "private.physical_batch=16",
    ],
    "dp-diffusion": [
        "denoiser.channels=8", "denoiser.multipliers=[1,2]", "denoiser.attention=[false,true]", "denoiser.patch=4",
        "denoiser.training.steps=3", "denoiser.training.batch_size=8", "private.expected_batch=20", "private.steps=3",
        "private.multiplicity=2", "private.physical_batch=8", "private.ema_decay=0.5", "generation.steps=4",
    ],
}  # fmt: skip
"""The smallest settings of the other methods."""
RELEASES = [
    "private.start=700", "private.tones.share=0.2", "private.moments.share=0.3", "private.moments.covariance=class",
    "private.moments.warmup.steps=3", "generation.retrieval=moments", "generation.start=500", "generation.steps=10",
    "private.distillation={candidates: 40, rounds: 1, rounds_before: 1, keep: 1, votes_share: 0.2, guidance: 1.5, "
    "training: {steps: 3}}",
    "generation.probe_guidance=0.5", "generation.enough_accepted=0.33", "generation.least_accepted=0.5",
    "generation.public_below=62",
]  # fmt: skip
"""Each release that RAPID can have, and what is computed from them."""
SPEED = [
    f"{name}.training.{field}"
    for name in ("autoencoder", "denoiser", "encoder", "probe")
    for field in ("steps=2", "batch_size=16")
]
"""Networks of full size, hardly trained."""
LEVELS, MOST_IMAGES = 2, 0.02
"""Images may differ from the CPU's by so many of 255 levels; such a share of them may differ by more, where rounding
leaves open which record is nearest."""
ENDS = 90
"""Seconds in which all ranks end when one was killed."""


def call(*arguments: object) -> str:
    """Run a command in this process; returns what it printed.

    Raises:
        Failed: its exit code is not 0.
    """
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), hidden():
        code = main([str(one) for one in arguments])
    lines = errors.getvalue().strip().splitlines()
    require(code == 0, f"rapid {arguments[0]} ended with {code}: {lines[-1] if lines else ''}")
    return out.getvalue()


def settings(overrides: Sequence[str]) -> list[str]:
    """The overrides as arguments."""
    return [word for one in overrides for word in ("--set", one)]


def images(setup: Setup) -> Outcome:
    """Save a few of the images that ship with rapid."""
    for name, count in (("letters", 60), ("digits", 100)):
        found = load_images(sample_path(name), name)
        assert found.labels is not None
        part = {"images": found.images[:count], "labels": found.labels[:count], "classes": np.array(found.classes)}
        np.savez(setup.folder / f"{name}.npz", **part)
    return "60 letters and 100 digits", {}


def build(setup: Setup) -> Outcome:
    """`build-kb`."""
    letters = setup.made("letters.npz")
    tiny = [*TINY, "generation.attempts=2"]
    call("build-kb", "--public", letters, "--preset", "demo", *settings(tiny), "--out", setup.folder / "public",
         "--device", setup.name)  # fmt: skip
    return "a public bundle", {}


def train(objective: str, *overrides: str, name: str = "") -> Check:
    """`train-private` with an objective, and a repeated one with --resume; the bundle is called as the objective, or
    otherwise.
    """

    def check(setup: Setup) -> Outcome:
        base, out = setup.made("public"), setup.folder / f"private-{name or objective}"
        command = [
            "train-private", "--base", base, "--private", setup.made("digits.npz"), "--epsilon", "8", "--out", out,
            "--device", setup.name, *settings([f"private.objective={objective}", *overrides]),
        ]  # fmt: skip
        call(*command)
        call(*command, "--resume")
        statement = json.loads((out / "privacy.json").read_text())
        return f"epsilon {statement['epsilon']}, {statement['steps']} steps", {}

    return check


def automatic(setup: Setup) -> Outcome:
    """Both stages with the preset `auto`, in a few seconds each, and images that are more varied, with soft labels."""
    base, out = setup.folder / "auto-public", setup.folder / "private-auto"
    minutes, here = ["--minutes", "0.2"], ["--device", setup.name]
    letters = setup.made("letters.npz") if setup.smallest else sample_path("letters")
    call("build-kb", "--public", letters, "--out", base, *minutes, *here)
    private = ["--private", setup.made("digits.npz"), "--epsilon", "50"]
    # a batch that is given is not refused for the few seconds
    batch = settings(["private.expected_batch=25"])
    call("train-private", "--base", base, *private, "--out", out, *minutes, *batch, *here)
    call("generate", "--model", out, "--count", "100", "--for-training", "--out", setup.folder / "training.npz", *here)
    statement = json.loads((out / "privacy.json").read_text())
    return f"{len(statement['releases'])} releases, {statement['steps']} steps, 100 images", {}


def other(method: str) -> Check:
    """`train-private` of another method, after its public stage if it needs one."""

    def check(setup: Setup) -> Outcome:
        out, digits, base = setup.folder / method, setup.made("digits.npz"), []
        tiny = ["--method", method, *settings(OTHERS[method]), "--device", setup.name]
        if method == "dp-diffusion":
            public = setup.folder / f"{method}-public"
            call("build-kb", "--public", setup.made("letters.npz"), *tiny, "--out", public)
            base, tiny = ["--base", public], ["--device", setup.name]
        call("train-private", *base, "--private", digits, "--epsilon", "8", "--out", out, *tiny)
        return "a private bundle", {}

    return check


def generate(bundle: str, *overrides: str) -> Check:
    """Images of the device and of the CPU, from the same seed."""

    def check(setup: Setup) -> Outcome:
        model, count = setup.made(bundle), 20 if setup.smallest else 200
        # without the probe, which is undecided between candidates when it is hardly trained
        chosen = ["generation.attempts=1", *overrides]
        ours, theirs = (
            generate_samples(open_generator(model, device, chosen), count, seed=1).images.astype(np.int16)
            for device in (setup.name, "cpu")
        )
        gaps = np.abs(ours - theirs).reshape(count, -1).max(1)
        share = float((gaps > LEVELS).mean())
        line = (
            f"{count} images: {share:.1%} differ from the CPU's by more than {LEVELS} of 255, at most by {gaps.max()}"
        )
        require(share <= MOST_IMAGES, line)
        return line, {"share": share, "largest": int(gaps.max())}

    return check


def command_generate(setup: Setup) -> Outcome:
    """`generate`, as a folder, `.npz` and picture."""
    model = setup.made("private-rapid")
    for out in ("folder", "samples.npz", "picture.png"):
        call("generate", "--model", model, "--count", "100", "--out", setup.folder / out, "--seed", "3", "--device",
             setup.name)  # fmt: skip
    return "a folder, an .npz and a picture", {}


def predict(setup: Setup) -> Outcome:
    """`predict` on the device and on the CPU."""
    found = []
    for number, device in enumerate((setup.name, "cpu")):
        # without a GPU both are the CPU
        out = setup.folder / f"predictions-{number}.csv"
        call("predict", "--model", setup.made("dp-classifier"), "--data", setup.made("digits.npz"), "--out", out,
             "--device", device)  # fmt: skip
        with out.open(newline="", encoding="utf-8") as stream:
            found.append(np.array([[float(p) for p in row[2:]] for row in list(csv.reader(stream))[1:]]))
    gap = float(np.abs(found[0] - found[1]).max())
    require(gap < 1e-2, f"probabilities differ from the CPU's by up to {gap:.1e}")
    return f"probabilities of 100 images differ from the CPU's by at most {gap:.1e}", {"gap": gap}


def evaluate(setup: Setup) -> Outcome:
    """`evaluate` of the generated images."""
    out, digits = setup.folder / "report.json", setup.made("digits.npz")
    call("evaluate", "--synthetic", setup.made("samples.npz"), "--real", digits, "--public", setup.made("letters.npz"),
         "--classifiers", "small", "--epochs", "1", "--out", out, "--device", setup.name)  # fmt: skip
    return "a report with one classifier", {}


def looked_at(setup: Setup) -> Outcome:
    """The commands that read: `info`, `plan`, `ledger show` and `ledger verify`."""
    model, digits = setup.made("private-rapid"), setup.made("digits.npz")
    call("info", model)
    call("plan", "--size", "1000", "--batch", "20", "--steps", "3", "--epsilon", "1")
    call("ledger", "show", digits)
    call("ledger", "verify")
    return "info, plan, ledger show, ledger verify", {}


def audit(setup: Setup) -> Outcome:
    """`audit --end-to-end`, which trains on the device."""
    few = ["--canaries", "40", "--steps", "3", "--sample-rate", "0.25"]
    call("audit", "--end-to-end", "--epsilon", "4", *few, "--base", setup.made("public"), "--device", setup.name)
    return "nothing refuted by 40 canaries", {}


def serve(setup: Setup) -> Outcome:
    """`serve` as a process: its images are those of `generate`."""
    command = [sys.executable, "-m", "rapid", "serve", "--model", str(setup.made("private-rapid")), "--port", "0",
               "--device", setup.name]  # fmt: skip
    log = setup.folder / "server.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            told = "" if found else log.read_text().strip()
            require(
                found is not None, f"the server did not start: {told.splitlines()[-1] if told else 'without a word'}"
            )
            assert found is not None
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{found.group()}/readyz", timeout=5):
                    break
                require(time.monotonic() < deadline, "the server did not become ready in 2 minutes")
                time.sleep(0.2)
            body = json.dumps({"count": 20, "seed": 1}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{found.group()}/generate", body, headers)
            with urllib.request.urlopen(request, timeout=120) as response:
                made = json.load(response)["images"]
        finally:
            process.terminate()
            process.wait(30)
    require(len(made) == 20, f"{len(made)} images, not 20")
    require(process.returncode == 0, f"the server ended with {process.returncode}")
    return "ready, 20 images, ended with 0", {}


def build_for_speed(setup: Setup) -> Outcome:
    """A public bundle with networks of the size of letters-mnist, for the times of sampling."""
    if setup.smallest:
        raise Skipped("the smallest sizes take the tiny bundle")
    views = ["augmentations.training=512", "augmentations.reference=4000"]
    call("build-kb", "--public", sample_path("letters"), "--preset", "letters-mnist", *settings([*SPEED, *views]),
         "--out", setup.folder / "speed", "--device", setup.name)  # fmt: skip
    return "a public bundle with networks of the size of letters-mnist", {}


def ranks(setup: Setup) -> Outcome:
    """`build-kb`, `generate` and `train-private` on two ranks; one rank is killed, and the run resumed."""
    if setup.name == "cuda" and torch.cuda.device_count() < 2:
        raise Skipped(f"needs two GPUs; there are {torch.cuda.device_count()}")
    letters, digits, here = setup.made("letters.npz"), setup.made("digits.npz"), ["--device", setup.name]
    _ended(_torchrun("build-kb", "--public", letters, "--preset", "demo", *settings(TINY), "--out",
                     setup.folder / "public-2", *here))  # fmt: skip
    one, two = setup.folder / "one.npz", setup.folder / "two.npz"
    drawn = ["generate", "--model", setup.made("private-rapid"), "--count", "60", "--seed", "5", *here]
    drawn += settings(["generation.batch_size=16"])
    call(*drawn, "--out", one)
    _ended(_torchrun(*drawn, "--out", two))
    with np.load(one) as first, np.load(two) as second:
        gaps = int((first["images"] != second["images"]).sum())
    require(gaps == 0, f"{gaps} pixels of two ranks are not those of one")
    out = setup.folder / "private-2"
    private = ["train-private", "--base", setup.made("public"), "--private", digits, "--epsilon", "8", "--out", out,
               *here, *settings(["private.steps=400"])]  # fmt: skip
    process = _torchrun(*private)
    assert process.stderr is not None
    _read_until(process.stderr, "denoiser  ")
    os.kill(_rank_of(process.pid, 1), signal.SIGKILL)
    begin = time.monotonic()
    try:
        process.communicate(timeout=ENDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        require(False, f"{ENDS} seconds after one rank was killed the others still run")
    seconds = time.monotonic() - begin
    require(process.returncode != 0, "a killed rank went unnoticed")
    require(not (out / "privacy.json").exists(), "a bundle was written although a rank was killed")
    _ended(_torchrun(*private, "--resume"))
    require((out / "privacy.json").exists(), "the resumed run wrote no bundle")
    return f"the job ended {seconds:.0f} s after a rank was killed, and went on", {"seconds_to_end": seconds}


def _torchrun(*arguments: object) -> subprocess.Popen[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command = [*launcher, "-m", "rapid", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=300)
    said = [line for line in errors.splitlines() if line.startswith("rapid")]
    require(process.returncode == 0, f"two ranks ended with {process.returncode}: {said[-1] if said else ''}")


def _read_until(stream: IO[str], words: str) -> None:
    shown = ""
    while words not in shown:
        character = stream.read(1)
        require(bool(character), f"the job ended before it trained: {shown[-200:]}")
        shown += character


def _rank_of(parent: int, rank: int) -> int:
    """The process that torchrun started for a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            environment: Any = (folder / "environ").read_text().split("\0")
            if int(status[1]) == parent and f"RANK={rank}" in environment:
                return int(folder.name)
    require(False, f"no process of rank {rank}")
    raise AssertionError
