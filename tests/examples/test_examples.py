"""The examples run as they stand, each as a process of its own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tests_process
from methods.mistaken import install
from PIL import Image
from tests_support import TINY

from rapid.data import sample_path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object, **environment: str) -> str:
    """What an example prints; it must end well and complain of nothing."""
    own = os.environ | {"PYTHONWARNINGS": "error"} | environment
    done = tests_process.run(*arguments, script=EXAMPLES / name, env=own, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed_and_tested() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", (EXAMPLES / "README.md").read_text()))
    assert listed == {file.name for file in EXAMPLES.glob("*.py")}
    tested = Path(__file__).read_text()
    assert all(f'"{name}"' in tested for name in listed)


@pytest.mark.filterwarnings("ignore")
def test_own_images_and_their_ledger(letters: Path, digits: Path, tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger.jsonl")
    overrides = [word for one in TINY for word in ("--set", one)]
    arguments = ["--public", letters, "--private", digits, "--epsilon", 8, "--count", 12, "--out", tmp_path / "run"]
    own = os.environ | {"RAPID_LEDGER": ledger}
    done = tests_process.run(*arguments, *overrides, script=EXAMPLES / "own_images.py", env=own, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "differentially private" in done.stdout
    assert np.load(tmp_path / "run" / "synthetic.npz")["images"].shape == (12, 32, 32)
    told = run("read_ledger.py", "--ledger", ledger)
    assert re.search(r"data set [0-9a-f]{32}: epsilon 7\.9\d+ without a limit", told)
    assert [name for name in ("overlap", "probe", "denoiser") if f"settle: {name} alone" not in told] == []


def test_private_classifier() -> None:
    told = run("private_classifier.py", "--epsilon", 8, "--steps", 25)
    found = re.search(r"epsilon (\S+) at delta 1e-05, accuracy (\S+)%", told)
    assert found is not None
    assert float(found[1]) <= 8
    assert float(found[2]) > 50


def test_endless_dataset(private_bundle: Path) -> None:
    told = run("endless_dataset.py", "--model", private_bundle, "--batches", 2, "--batch-size", 10)
    assert re.findall(r"batch (\d): loss", told) == ["1", "2"]


@pytest.mark.parametrize("name", ["layer.py", "mechanism.py"])
def test_the_code_of_the_docs(name: str) -> None:
    run(f"../docs/extending/{name}")


def test_the_method_of_the_docs(digits: Path, tmp_path: Path) -> None:
    """Installed as a package: it learns digits, asked again it is finished, and its steps pass an audit."""
    code = EXAMPLES.parent / "docs" / "extending"
    install(tmp_path, "small", "small-classifier = small_classifier:METHOD")
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(code)]), "PYTHONWARNINGS": "error"}
    method, real = ["--method", "small-classifier"], sample_path("digits")
    train = ["train-private", *method, "--private", real, "--epsilon", 8, "--out", tmp_path / "model"]
    for more in ([], ["--resume"]):
        done = tests_process.run(*train, "--set", "private.steps=60", *more, env=own)
        assert done.returncode == 0, done.stderr
    privacy = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert (privacy["dataset_size"], privacy["steps"]) == (10_000, 60)
    numbers = ["--size", 10_000, "--epsilon", 8, "--batch", 500, "--steps", 60]
    done = tests_process.run("plan", *method, *numbers, "--json", env=own)
    (planned,) = json.loads(done.stdout)["plans"]
    assert planned["noise_multiplier"] == pytest.approx(privacy["noise_multiplier"], rel=1e-6)
    told = tests_process.run("plan", *method, *numbers, env=own).stdout
    assert "trained parameters (small-classifier)" in told
    table = tmp_path / "predictions.csv"
    done = tests_process.run("predict", "--model", tmp_path / "model", "--data", real, "--out", table, env=own)
    assert done.returncode == 0, done.stderr
    found = [row.split(",")[1] for row in table.read_text().splitlines()[1:]]
    assert np.mean(np.array(found) == np.load(real)["labels"].astype(str)) > 0.5
    done = tests_process.run("audit", "--end-to-end", *method, "--epsilon", 1, "--canaries", 20, "--steps", 20, env=own)
    assert done.returncode == 0, done.stderr
    assert "no deviation found" in done.stdout


def test_read_ledger_without_a_ledger(tmp_path: Path) -> None:
    assert "nothing was spent" in run("read_ledger.py", "--ledger", tmp_path / "none.jsonl")


def test_client(private_bundle: Path, tmp_path: Path) -> None:
    with tests_process.Program("serve", "--model", private_bundle, "--port", 0) as server:
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        told = run("client.py", "--url", found[0], "--count", 3, "--labels", "1,7", "--seed", 2, "--out", tmp_path)
    assert "3 images of private (epsilon 9.99" in told
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == ["000-1.png", "001-7.png", "002-1.png"]
    with Image.open(tmp_path / names[0]) as image:
        assert image.size == (32, 32)
