"""From 100 digits to images, on the command line, in a library call and behind the server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from methods.tiny import TINY, flags
from numpy.typing import NDArray
from PIL import Image
from tests_process import Program, run
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.data import fit_images, load_images
from rapid.methods import find_method, open_generator
from rapid.methods.base import Inspectable
from rapid.sampling.generate import generate

TRAIN = ["train-private", "--method", "dpdm", "--epsilon", 10]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    return os.environ | {"RAPID_LEDGER": str(ledger), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(environment: dict[str, str], digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private bundle: its training was killed and resumed."""
    out = tmp_path_factory.mktemp("dpdm") / "model"
    arguments = [*TRAIN, "--private", digits, "--out", out, *flags(TINY["dpdm"]["settings"]),
                 "--set", "private.steps=40", "--set", "private.checkpoint_seconds=0"]  # fmt: skip
    child = Program(*arguments, env=environment)
    while not (out / "checkpoints" / "denoiser.pt").exists() and child.poll() is None:
        time.sleep(0.002)
    child.kill()
    child.wait()
    child.close()
    resumed = run(*arguments, "--resume", env=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert "differentially private" in resumed.stdout
    return out


def test_the_bundle_says_what_was_trained(model: Path, environment: dict[str, str]) -> None:
    privacy = json.loads((model / "privacy.json").read_text())
    assert (privacy["method"], privacy["multiplicity"]) == ("dpdm", 2)
    assert [release["name"] for release in privacy["releases"]] == ["denoiser"]
    assert privacy["epsilon"] <= 10
    config = json.loads((model / "denoiser" / "config.json").read_text())
    assert (config["configuration"], config["sigma_data"]) == ("edm", pytest.approx(3**-0.5))
    assert "without public images" in (model / "README.md").read_text()
    told = run("info", model, env=environment)
    assert '"configuration": "edm"' in told.stdout


def pixels(model: Path, batch: int, *changes: str) -> NDArray[np.uint8]:
    made = generate(
        open_generator(model, "cpu", [f"generation.batch_size={batch}", *changes]), 7, labels=[3] * 7, seed=11
    )
    return made.images


@pytest.mark.parametrize(
    "changes",
    [
        ["generation.sampler=ddim"],
        ["generation.sampler=stochastic-ddim"],
        ["generation.sampler=churn", "generation.churn=4", "generation.churn_min=0", "generation.guidance=0.5"],
    ],
)
def test_an_image_does_not_depend_on_its_batch(model: Path, changes: list[str]) -> None:
    together, few = pixels(model, 7, *changes), pixels(model, 2, *changes)
    assert_same_images(few, together)
    assert len({image.tobytes() for image in together}) == 7


def test_calls(model: Path) -> None:
    for sampler, calls in (("ddim", 9), ("stochastic-ddim", 9), ("churn", 17)):
        assert open_generator(model, "cpu", [f"generation.sampler={sampler}"]).calls(9) == calls


@pytest.fixture(params=["churn", "stochastic-ddim"])
def stochastic(
    request: pytest.FixtureRequest, environment: dict[str, str], model: Path, digits: Path, tmp_path: Path
) -> Path:
    """A bundle with a stochastic sampler: a server takes the sampler of its bundle."""
    if request.param == Bundle.open(model, "model").config.settings["generation"]["sampler"]:
        return model
    done = run(*TRAIN, "--private", digits, "--out", tmp_path / "model", *flags(TINY["dpdm"]["settings"]),
               "--set", f"generation.sampler={request.param}", env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tmp_path / "model"


def test_command_line_and_server_make_the_same_images(
    stochastic: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """In batches of two and of three: the noise within the sampler depends on seed and number alone."""
    model, out = stochastic, tmp_path / "images.npz"
    (phase,) = open_generator(model, "cpu").route()
    assert any(phase.sampler.noisy)
    done = run("generate", "--model", model, "--count", 5, "--labels", "1,2", "--seed", 7, "--out", out,
               "--set", "generation.batch_size=2", env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = np.load(out)["images"]
    assert made.shape == (5, 32, 32)
    with Program("serve", "--model", model, "--port", 0, "--batch", 3, env=environment) as server:
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            with httpx.Client(base_url=found[0], timeout=60) as client:
                deadline = time.monotonic() + 60
                while client.get("/readyz").status_code != 200:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                asked = {"count": 5, "labels": ["1", "2", "1", "2", "1"], "seed": 7}
                answer = client.post("/generate", json=asked).json()
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    served = np.stack([np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))) for png in answer["images"]])
    assert_same_images(served, made)


def test_what_an_audit_and_an_attack_need(model: Path, digits: Path) -> None:
    method, bundle = find_method("dpdm"), Bundle.open(model, "model")
    assert isinstance(method, Inspectable)
    for subject in method.audited(bundle):
        losses = subject.losses(torch.arange(subject.count))
        # the same draws whenever it is called
        torch.testing.assert_close(subject.losses(torch.tensor([5, 0])), losses[[5, 0]], rtol=1e-4, atol=1e-5)
        # two floats may be the same by chance
        assert losses.unique().numel() >= subject.count - 1
    images = fit_images(load_images(digits, "digits"), bundle.config.image, "digits")
    (scores,) = method.membership_scores(bundle, images, torch.device("cpu")).values()
    assert scores.shape == (100,)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "private.expected_batch=101"], "--set private.expected_batch=101: "),
        (["--base", "nowhere"], "--base nowhere: "),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    environment: dict[str, str], digits: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run(*TRAIN, "--private", digits, "--out", tmp_path / "m", *arguments, env=environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()
