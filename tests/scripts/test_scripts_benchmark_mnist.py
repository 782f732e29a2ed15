"""scripts/benchmark-mnist as a process: what it refuses, and the table of runs that are done."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tests_process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmark_mnist.py"
SETS = ("letters", "devanagari", "mnist-train", "mnist-test")


def environment() -> dict[str, str]:
    """Taken when a test runs: by then it names the tests' own ledger."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def options(data: Path, folder: Path, *arguments: str) -> list[str]:
    own = ["--data", str(data), "--out", str(folder / "runs"), "--report", str(folder / "report")]
    return [*own, *arguments]


def run(data: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return tests_process.run(*options(data, folder, *arguments), env=environment(), script=SCRIPT)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in SETS:
        (folder / f"{name}.npz").write_bytes(b"not looked at when all is done")
    return folder


def finished(runs: Path, name: str, accuracies: list[dict[str, float]]) -> None:
    """The files that a row leaves, in the forms of `rapid generate` and `rapid evaluate`."""
    for bundle in (runs / "public", runs / name):
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "config.json").write_text(json.dumps({"settings": {"preset": bundle.name}}))
    (runs / name / "privacy.json").write_text(json.dumps({"epsilon": 0.99}))
    (runs / "times.json").write_text(json.dumps({"public": 600.0, name: 90.0, f"{name}-generate1": 30.0}))
    for seed, found in enumerate(accuracies):
        np.savez(runs / f"{name}-seed{seed}.npz", images=np.zeros((20, 8, 8), np.uint8), labels=np.arange(20) % 10)
        networks = {network: {"accuracy": accuracy} for network, accuracy in found.items()}
        utility = {"networks": networks, "mean": sum(found.values()) / len(found)}
        network = {"file": "features.safetensors"}
        likeness = {"images": 20, "frechet": 2.0 + seed, "precision": 0.5, "recall": 0.25}
        report = {
            "utility": {"synthetic": utility},
            "fidelity": {"synthetic": likeness, "network": network},
            "agreement": {"synthetic": {"agreed": 0.8 + 0.1 * seed}},
        }
        (runs / f"{name}-seed{seed}.json").write_text(json.dumps(report))
        made = {"acceptance": 0.4, "calls_per_image": 9.0 + seed}
        (runs / f"{name}-made{seed}.json").write_text(json.dumps(made))
        np.savez(runs / f"{name}-drawn{seed}.npz", images=np.zeros((20, 8, 8), np.uint8), labels=np.arange(20) % 10)
        report["utility"] = {"synthetic": {**utility, "mean": utility["mean"] / 2}}
        (runs / f"{name}-drawn{seed}.json").write_text(json.dumps(report))
    floor = {"images": 20, "frechet": 1.25, "precision": 0.75, "recall": 0.625}
    titles = {"synthetic": "synthetic images", "real": "real training images", "public": "public images"}
    floors = {"fidelity": {"sets": titles, "real": floor, "public": {**floor, "frechet": 300.0}}}
    (runs / "floors.json").write_text(json.dumps(floors))
    features = runs.parent / "report" / "features.safetensors"
    features.parent.mkdir(exist_ok=True)
    features.touch()


def test_the_table_of_what_is_done(data: Path, tmp_path: Path) -> None:
    one = {"resnet": 0.97, "wideresnet": 0.98, "resnext": 0.99}
    two = {"resnet": 0.95, "wideresnet": 0.96, "resnext": 0.97}
    finished(tmp_path / "runs", "rapid-1", [one, two])
    done = run(data, tmp_path, "--epsilons", "1", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "==" not in done.stdout  # no command was run again
    table = (tmp_path / "report" / "table.md").read_text()
    line = next(line for line in table.splitlines() if line.startswith("| 1 | rapid | 2 |"))
    assert "| 96.00 (95.00 to 97.00) | 97.00 (96.00 to 98.00) | 98.00 (97.00 to 99.00) |" in line
    assert "| **97.00 (96.00 to 98.00)** |" in line
    # as drawn, accepted, calls, agreement, distance, precision, recall
    assert "| 48.50 (48.00 to 49.00) | 40.00 (40.00 to 40.00) | 9.50 (9.00 to 10.00) | 85.00 (80.00 to 90.00) " in line
    assert "| 2.5 | 0.5 | 0.25 |" in line
    assert "| real training images | 20 | 1.25 | 0.75 | 0.625 |" in table
    assert "| public images | 20 | 300 | 0.75 | 0.625 |" in table
    assert "| 10.0 | 1.5 | 0.5 |" in line  # minutes: public, private, generation of the seed that was timed
    assert (tmp_path / "report" / "samples" / "rapid-1.png").exists()

    finished(tmp_path / "runs", "ldm-1", [two])
    done = run(data, tmp_path, "--epsilons", "1", "--objectives", "ldm")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report" / "results.json").read_text())["rows"]
    assert [(row["objective"], row["seeds"]) for row in rows] == [("ldm", 1), ("rapid", 2)]
    assert rows[0]["settings"] == {"preset": "ldm-1"}
    assert rows[0]["privacy"] == {"epsilon": 0.99}
    assert rows[1]["mean"] == pytest.approx([98.0, 96.0])
    assert rows[1]["drawn"]["mean"] == pytest.approx([49.0, 48.0])
    assert rows[1]["features"]["file"] == "features.safetensors"
    assert line in (tmp_path / "report" / "table.md").read_text()


def test_the_row_of_the_public_model(data: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    finished(runs, "public-0", [{"resnet": 0.1}])
    (runs / "public-0" / "privacy.json").unlink()
    (runs / "public-0" / "config.json").unlink()
    settings = {"preset": "letters-mnist", "generation": {"steps": 6, "retrieval": "class"}}
    (runs / "public" / "config.json").write_text(json.dumps({"settings": settings}))
    labels = np.arange(60) % 49
    np.savez(runs / "public-0-public0.npz", images=np.zeros((60, 8, 8), np.uint8), labels=labels)
    (runs / "public-0-seed0.npz").unlink()
    done = run(data, tmp_path, "--epsilons", "0")
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "report" / "results.json").read_text())["rows"][0]
    assert row["privacy"] is None
    assert row["settings"] == {"preset": "letters-mnist", "generation": {"steps": 6, "retrieval": "query"}}
    assert np.load(runs / "public-0-seed0.npz")["labels"].tolist() == [label % 10 for label in labels]


@pytest.mark.parametrize(
    ("argument", "value", "fix"),
    [
        ("--seeds", "0", "at least 1"),
        ("--count", "-5", "at least 1"),
        ("--processes", "0", "at least 1"),
        ("--epsilons", "1,x", "1,x: must be numbers of at least 0"),
        ("--epsilons", "-1", "-1: must be"),
        ("--epsilons", "nan", "nan: must be"),
        ("--epsilons", "1,inf", "1,inf: must be"),
        ("--objectives", "rapid,fast", "rapid,late,ldm"),
        ("--classifiers", "vgg", "resnet"),
    ],
)
def test_bad_arguments(data: Path, tmp_path: Path, argument: str, value: str, fix: str) -> None:
    done = run(data, tmp_path, f"{argument}={value}")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert argument in last
    assert fix in last
    assert not (tmp_path / "runs").exists()


def test_a_set_that_is_not_there(data: Path, tmp_path: Path) -> None:
    (data / "devanagari.npz").unlink()
    done = run(data, tmp_path)
    assert done.returncode == 2
    assert "devanagari.npz" in done.stderr.splitlines()[-1]


def test_a_command_that_fails_ends_it(data: Path, tmp_path: Path) -> None:
    done = run(data, tmp_path, "--epsilons", "1")
    assert done.returncode == 2  # that of `rapid build-kb`, which says what is wrong with letters.npz
    assert "letters.npz" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report").exists()


def test_ctrl_c_lets_the_command_save_what_it_has(data: Path, tmp_path: Path, letters: Path) -> None:
    for name in ("letters", "devanagari"):
        shutil.copy(letters, data / f"{name}.npz")
    # a shell starts background jobs with SIGINT ignored, and children inherit that but no handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = [sys.executable, str(SCRIPT), *options(data, tmp_path, "--epsilons", "1")]
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        shown = ""
        while not re.search(r"autoencoder +: +[^|]*\|[^|]*\| +[1-9]", shown):
            character = process.stderr.read(1)
            assert character, shown
            shown += character
        # a terminal sends it to all processes of the group
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "rerun the command with --resume" in errors
    assert "Traceback" not in errors
    assert list((tmp_path / "runs" / "public" / "checkpoints").iterdir())
    assert json.loads((tmp_path / "runs" / "times.json").read_text())["public"] > 0
