"""scripts/benchmark-methods as a process: what it refuses, and the table of runs that are done."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests_process
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmark_methods.py"
SETS = ("letters", "devanagari", "mnist-train", "mnist-test")
ACCURACIES = {"resnet": 0.97, "wideresnet": 0.98, "resnext": 0.99}
FIDELITY = {"frechet": 12.5, "precision": 0.8, "recall": 0.7, "density": 1.0, "coverage": 0.9}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in SETS:
        (folder / f"{name}.npz").write_bytes(b"not looked at when all is done")
    return folder


def run(data: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = ["--data", str(data), "--out", str(folder / "runs"), "--report", str(folder / "report"), *arguments]
    return tests_process.run(*own, env=os.environ | {"PYTHONPATH": str(ROOT)}, script=SCRIPT)


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def finished(runs: Path, name: str, components: list[str], *variants: str) -> None:
    """The files that a method leaves, in the forms of the commands."""
    for bundle in (runs / f"{name}-public", runs / f"{name}-10"):
        config = {"settings": {"preset": bundle.name}, "components": dict.fromkeys(components, "0" * 64)}
        write(bundle / "config.json", config)
    write(runs / f"{name}-10" / "privacy.json", {"epsilon": 9.99, "steps": 1234, "noise_multiplier": 1.5})
    times = {f"{name}-public": 600.0, f"{name}-10": 1800.0}
    for variant in variants:
        step = f"{name}-10{variant}"
        images = np.zeros((20, 8, 8), np.uint8)
        np.savez(runs / f"{step}.npz", images=images, labels=np.arange(20) % 10, classes=list("0123456789"))
        utility = {"networks": {key: {"accuracy": value} for key, value in ACCURACIES.items()}, "mean": 0.98}
        report = {"utility": {"synthetic": utility}, "fidelity": {"synthetic": FIDELITY}}
        write(runs / f"{step}.json", report | {"agreement": {"synthetic": {"agreed": 0.875}}})
        (runs / "said").mkdir(exist_ok=True)
        (runs / "said" / f"{step}-generate.txt").write_text("x.npz: 20 images, seed 0, 12.25 network calls an image\n")
        times[f"{step}-generate"] = 0.5
    write(runs / "times.json", times)
    write(runs / "processor.json", {step: seconds / 2 for step, seconds in times.items()})
    (runs / "real.npz").write_bytes(b"")
    write(runs / "real.json", {"fidelity": {"synthetic": FIDELITY | {"frechet": 0.25}}})


def test_the_table_of_what_is_done(data: Path, tmp_path: Path) -> None:
    finished(tmp_path / "runs", "rapid", ["denoiser", "probe"], "-drawn", "-probe")
    done = run(data, tmp_path, "--epsilons", "10", "--methods", "rapid", "--count", "20")
    assert done.returncode == 0, done.stderr
    assert "==" not in done.stdout  # no command was run again
    table = (tmp_path / "report" / "table.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| 10 | rapid |")]
    assert lines[0].startswith("| 10 | rapid | as drawn | 98.00 | 97.00 | 98.00 | 99.00 | 12.5 | 0.800 | 0.700 |")
    assert lines[1].startswith("| 10 | rapid | with the probe |")
    # label agreement, calls, milliseconds an image, minutes and processor time of both stages, steps, noise
    assert lines[0].endswith("| 87.5 | 12.25 | 25 | 10.0 | 30.0 | 5.0 | 15.0 | 1,234 | 1.5 |")
    assert "As many real training images have 0.25, precision 0.800" in table
    for name in ("rapid-10-drawn", "rapid-10-probe"):
        assert (tmp_path / "report" / "samples" / f"{name}.png").exists()

    runs = tmp_path / "runs"
    finished(runs, "dp-classifier", ["classifier"])
    found = {"accuracy": 0.985, "calibration": {"expected_error": 0.01}}
    write(runs / "dp-classifier-10-test.json", found)
    Image.new("RGB", (4, 4)).save(runs / "dp-classifier-10-test-confusion.png")
    refused = run(data, tmp_path, "--epsilons", "10", "--methods", "dp-classifier", "--count", "30")
    assert refused.returncode == 2
    assert "was begun with count 20, and now it is 30; choose another folder" in refused.stderr
    done = run(data, tmp_path, "--epsilons", "10", "--methods", "dp-classifier", "--count", "20")
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "report" / "table.md").read_text()
    assert all(line in table for line in lines)  # earlier rows stay
    assert "| 10 | dp-classifier | none | 98.50 |" in table
    assert "As many real training images" in table
    rows = json.loads((tmp_path / "report" / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["rapid", "rapid", "dp-classifier"]
    assert rows[0]["privacy"]["steps"] == 1234


@pytest.mark.parametrize(
    ("argument", "value", "fix"),
    [
        ("--minutes", "0", "at least 0.1"),
        ("--count", "-5", "at least 1"),
        ("--threads", "0", "at least 1"),
        ("--epsilons", "1,x", "positive numbers"),
        ("--epsilons", "0", "positive numbers"),
        ("--methods", "rapid,fast", "dp-diffusion"),
        ("--classifiers", "vgg", "resnet"),
        ("--public", "nothing", "nothing.npz"),
        ("--set", "private.steps=5", "METHOD:"),
    ],
)
def test_bad_arguments(data: Path, tmp_path: Path, argument: str, value: str, fix: str) -> None:
    done = run(data, tmp_path, f"{argument}={value}")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert fix in last
    assert not (tmp_path / "runs").exists()


def test_a_command_that_fails_ends_it(data: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "real.npz").write_bytes(b"")
    write(tmp_path / "runs" / "real.json", {"fidelity": {"synthetic": FIDELITY}})
    done = run(data, tmp_path, "--epsilons", "1", "--methods", "dp-diffusion")
    assert done.returncode == 2  # that of `rapid build-kb`, which says what is wrong with letters.npz
    assert "letters.npz" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report").exists()
