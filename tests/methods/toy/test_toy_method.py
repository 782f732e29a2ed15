"""A method from outside, without a line changed elsewhere: it trains, generates, serves, resumes and is charged."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import httpx
import numpy as np
import pytest
from tests_process import Program, run

from rapid.data import sample_path

HERE = Path(__file__).parent
DIGITS = sample_path("digits")
ENTRY_POINT = "[rapid.methods]\nclass-means = class_means:METHOD\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which the toy is an installed package: a distribution with an entry point on the path."""
    site = tmp_path_factory.mktemp("site")
    info = site / "class_means-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: class-means\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    path = os.pathsep.join([str(site), str(HERE)])
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    return os.environ | {"PYTHONPATH": path, "RAPID_LEDGER": str(ledger), "OMP_NUM_THREADS": "1"}


def rapid(environment: dict[str, str], *arguments: object) -> CompletedProcess[str]:
    return run(*arguments, env=environment)


@pytest.fixture(scope="module")
def model(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private bundle of the toy method, made by the command line."""
    out = tmp_path_factory.mktemp("toy") / "model"
    done = rapid(environment, "train-private", "--method", "class-means", "--private", DIGITS, "--epsilon", 8,
                 "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "differentially private" in done.stdout
    return out


def test_the_bundle_is_complete(model: Path) -> None:
    privacy = json.loads((model / "privacy.json").read_text())
    assert privacy["method"] == "class-means"
    assert [release["name"] for release in privacy["releases"]] == ["means"]
    assert privacy["epsilon"] <= 8
    assert privacy["event"]["type"] == "GaussianDpEvent"
    assert json.loads((model / "model_index.json").read_text())["means"] == ["class_means", "Means"]
    assert "noisy mean of its class" in (model / "README.md").read_text()


def test_it_generates_class_means(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    """A thousand images a class bear the noise: what is sampled is close to the mean of the real images."""
    out = tmp_path / "images.npz"
    done = rapid(environment, "generate", "--model", model, "--count", 40, "--out", out, "--seed", 1,
                 "--set", "generation.deviation=0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    made, real = np.load(out), np.load(DIGITS)
    for label in range(10):
        expected = np.pad(real["images"][real["labels"] == label].mean(0), 2)
        found = made["images"][made["labels"] == label].astype(float)
        assert np.abs(found - expected).mean() < 8
    again = tmp_path / "again.npz"
    assert rapid(environment, "generate", "--model", model, "--count", 40, "--out", again, "--seed", 1,
                 "--set", "generation.deviation=0").returncode == 0  # fmt: skip
    assert (np.load(again)["images"] == made["images"]).all()


def test_info_evaluate_and_ledger_know_it(
    environment: dict[str, str], model: Path, digits: Path, tmp_path: Path
) -> None:
    told = rapid(environment, "info", model)
    assert '"method": "class-means"' in told.stdout
    assert '"bound": 16.0' in told.stdout
    images = tmp_path / "images.npz"
    assert rapid(environment, "generate", "--model", model, "--count", 40, "--out", images).returncode == 0
    report = tmp_path / "report.json"
    done = rapid(environment, "evaluate", "--synthetic", images, "--real", digits, "--classifiers", "small",
                 "--epochs", 1, "--out", report)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert report.is_file()
    shown = json.loads(rapid(environment, "ledger", "show", "--json").stdout)
    (dataset,) = shown["datasets"]
    (run,) = dataset["runs"]
    assert run["kind"] == "settle"
    assert [release[0] for release in run["releases"]] == ["means"]


def test_it_is_served(environment: dict[str, str], model: Path) -> None:
    with Program("serve", "--model", model, "--port", 0, env=environment) as server:
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            with httpx.Client(base_url=found[0], timeout=60) as client:
                deadline = time.monotonic() + 60
                while client.get("/readyz").status_code != 200:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                answer = client.post("/generate", json={"count": 3, "labels": ["1", 2, "3"], "seed": 5}).json()
                assert answer["labels"] == ["1", "2", "3"]
                assert answer["privacy"]["method"] == "class-means"
                assert client.get("/info").json()["model"] == "model"
                assert client.get("/entries/0").status_code == 422
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)


def test_a_killed_run_is_resumed_and_charged_once(environment: dict[str, str], digits: Path, tmp_path: Path) -> None:
    """SIGKILL as soon as the release is recorded: the resumed run finishes with that very result."""
    own = environment | {"RAPID_LEDGER": str(tmp_path / "ledger.jsonl")}
    out = tmp_path / "model"
    arguments = ["train-private", "--method", "class-means", "--private", digits, "--epsilon", 2, "--out", out]
    child = Program(*arguments, env=own)
    record = out / "checkpoints" / "means.pt"
    while not record.exists() and child.poll() is None:
        time.sleep(0.0005)
    child.kill()
    child.wait()
    child.close()
    before = json.loads(rapid(own, "ledger", "show", "--json").stdout)["datasets"][0]
    resumed = rapid(own, *arguments, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    after = json.loads(rapid(own, "ledger", "show", "--json").stdout)["datasets"][0]
    assert after["epsilon"] == pytest.approx(before["epsilon"])
    assert len(after["runs"]) == 1
    # asked again, the finished run is recognised, and nothing more is spent
    assert rapid(own, *arguments, "--resume").returncode == 0
    assert json.loads(rapid(own, "ledger", "show", "--json").stdout)["datasets"][0]["epsilon"] == after["epsilon"]


def test_it_has_no_public_stage(environment: dict[str, str], letters: Path, tmp_path: Path) -> None:
    done = rapid(environment, "build-kb", "--method", "class-means", "--public", letters, "--out", tmp_path / "kb")
    assert done.returncode == 2
    assert done.stderr == "rapid: --method class-means: has no public stage; start with train-private\n"
    assert not (tmp_path / "kb").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "no-such"], "--method no-such: is unknown; choose one of class-means, "),
        (["--method", "rapid"], "--base: rapid needs a public bundle"),
        ([], "--base: give a public bundle, or a --method that needs none"),
        (["--method", "class-means", "--set", "private.bound=-1"], "--set private.bound: must be more than"),
    ],
)
def test_wrong_methods_are_refused_in_one_line(
    environment: dict[str, str], digits: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = rapid(environment, "train-private", "--private", digits, "--epsilon", 1, "--out", tmp_path / "m", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_its_private_stage_is_audited(environment: dict[str, str]) -> None:
    """Of a mean, noise and sensitivity are tested as for a training."""
    command = ["audit", "--end-to-end", "--method", "class-means", "--epsilon", 1, "--canaries", 40, "--json"]
    done = rapid(environment, *command, "--confidence", 0.9999)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["releases"] == ["means"]
    assert record["counts"] == []
    assert record["power"]["means"]["noise"] < 0.05
    tests = {one["test"] for one in record["tests"]["findings"] if one["subject"] == "means"}
    assert {"noise: scale", "sensitivity: canaries that take part"} <= tests


@pytest.mark.parametrize(
    ("entry", "content", "words"),
    [
        ("broken = broken:METHOD", "import nowhere\n", "the package class-means cannot be loaded (ModuleNotFoundError"),
        ("broken = broken:METHOD", "METHOD = 3\n", "the package class-means has no method under this name"),
        ("broken = class_means:METHOD", "", "has the method class-means under this name; mend its entry point"),
    ],
)
def test_a_package_that_is_wrong_is_told(
    environment: dict[str, str], tmp_path: Path, entry: str, content: str, words: str
) -> None:
    info = tmp_path / "class_means-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: class-means\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rapid.methods]\n{entry}\n")
    (tmp_path / "broken.py").write_text(content)
    there = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE)])}
    done = rapid(there, "train-private", "--method", "broken", "--private", DIGITS, "--epsilon", 8, "--out", "out")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("rapid: --method broken: ") and words in line


def test_its_bundle_needs_its_package(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    there = environment | {"PYTHONPATH": ""}
    done = rapid(there, "generate", "--model", model, "--count", 2, "--out", tmp_path / "images.npz")
    assert done.returncode == 2
    assert done.stderr.startswith(f"rapid: --model {model}: was made by the method class-means, which is not installed")
