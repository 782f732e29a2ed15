"""DP diffusion without public images, as a user meets it: training, resuming, images, server, plan, audit, choice."""

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
from methods.tiny import TINY, flags
from PIL import Image
from tests_process import Program, run
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.config.presets import build_settings
from rapid.dp import PublicFacts
from rapid.errors import InputError
from rapid.methods.dp_diffusion.private_stage import releases
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser

SCRATCH = TINY["dp-diffusion"]["settings"] | TINY["dp-diffusion"]["public"]
METHOD = ["--method", "dp-diffusion", *flags(SCRATCH), "--set", "denoiser.pretrained=false"]
MISSING = "is missing, but denoiser.pretrained=true begins from a public network; make one with rapid build-kb"
BUDGET = ["--epsilon", 8, "--delta", 1e-3]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    return os.environ | {"RAPID_LEDGER": str(ledger), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(environment: dict[str, str], digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private bundle: its training was killed and resumed."""
    out = tmp_path_factory.mktemp("scratch") / "model"
    command = ["train-private", *METHOD, "--private", digits, *BUDGET, "--out", out,
               "--set", "private.steps=40", "--set", "private.checkpoint_seconds=0"]  # fmt: skip
    child = Program(*command, env=environment)
    while not (out / "checkpoints" / "denoiser.pt").exists() and child.poll() is None:
        time.sleep(0.002)
    child.kill()
    child.wait()
    child.close()
    assert not (out / "config.json").exists()
    resumed = run(*command, "--resume", env=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert "differentially private" in resumed.stdout
    return out


def test_the_bundle_tells_of_no_public_images(model: Path, environment: dict[str, str], digits: Path) -> None:
    privacy = json.loads((model / "privacy.json").read_text())
    assert [release["name"] for release in privacy["releases"]] == ["denoiser"]
    assert 7 < privacy["epsilon"] <= 8
    # the default share of the overlap check is above 0, but there are no public images to compare with
    assert privacy["notes"] == []
    assert sorted(path.name for path in model.iterdir() if path.is_dir()) == ["checkpoints", "denoiser"]
    assert "began with random weights" in (model / "README.md").read_text()
    told = run("info", "--verify", model, env=environment)
    assert told.returncode == 0, told.stderr
    assert "public_classes" not in told.stdout
    assert '"timesteps": 1000' in told.stdout
    (found,) = json.loads(run("ledger", "show", "--json", digits, env=environment).stdout)["datasets"]
    # one of the steps may have been taken twice
    assert 0.99 * privacy["epsilon"] < found["epsilon"] < 1.1 * privacy["epsilon"]
    table = Bundle.open(model, "model", "private").component("denoiser", Denoiser).class_table.weight
    assert table.shape[0] == 11


def test_command_line_and_server_make_the_same_images(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "images.npz"
    made = run("generate", "--model", model, "--count", 4, "--labels", "1,2", "--seed", 7, "--out", out,
               "--set", "generation.batch_size=3", env=environment)  # fmt: skip
    assert made.returncode == 0, made.stderr
    with Program("serve", "--model", model, "--port", 0, env=environment) as server:
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        with httpx.Client(base_url=found[0], timeout=60) as client:
            deadline = time.monotonic() + 60
            while client.get("/readyz").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            asked = {"count": 4, "labels": ["1", "2", "1", "2"], "seed": 7}
            answer = client.post("/generate", json=asked).json()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    served = np.stack([np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))) for png in answer["images"]])
    assert_same_images(served, np.load(out)["images"])


def test_it_is_planned_and_audited_without_a_base(environment: dict[str, str]) -> None:
    planned = run("plan", "--preset", "dp-diffusion-mnist", "--size", 50_000, "--epsilon", 10, "--delta", 1e-5,
                  "--batch", 4096, "--steps", 4000, "--json", env=environment)  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    told = json.loads(planned.stdout)
    (row,) = told["plans"]
    # the paper prints 2.852, by an accountant that is less tight
    assert 2.5 < row["noise_multiplier"] < 2.852
    assert told["shares"] == {}
    audited = run("audit", "--end-to-end", *METHOD, "--epsilon", 2, "--delta", 1e-3, "--canaries", 40, "--steps", 2,
                  "--json", env=environment)  # fmt: skip
    assert audited.returncode == 0, audited.stderr
    assert json.loads(audited.stdout)["refuted"] is False


def test_settings_are_chosen_without_a_base(environment: dict[str, str], digits: Path, tmp_path: Path) -> None:
    (tmp_path / "candidates.yaml").write_text("usual: {}\nquick: {private.learning_rate: 0.002}\n")
    out = tmp_path / "tuned"
    done = run("tune", *METHOD, "--private", digits, "--epsilon", 5, "--delta", 1e-3, "--out", out, "--candidates",
               tmp_path / "candidates.yaml", "--mean-trials", 1.5, "--shape", 0, "--score-images", 20,
               env=environment | {"RAPID_LEDGER": str(tmp_path / "ledger.jsonl")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    statement = json.loads((out / "privacy.json").read_text())
    assert [release["name"] for release in statement["releases"]] == ["denoiser", "tuning-score"]


def test_minutes_choose_the_number_of_steps(environment: dict[str, str], digits: Path, tmp_path: Path) -> None:
    own = {name: value for name, value in SCRATCH["private"].items() if name != "steps"}
    settings = flags(SCRATCH | {"private": own, "denoiser": SCRATCH["denoiser"] | {"pretrained": False}})
    done = run("train-private", "--method", "dp-diffusion", *settings, "--private", digits, *BUDGET, "--out",
               tmp_path / "m", "--minutes", 0.02,
               env=environment | {"RAPID_LEDGER": str(tmp_path / "ledger.jsonl")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"private: [\d,]+ steps in 0.02 minutes", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "dp-diffusion"], f"--base: {MISSING}"),
        (["--preset", "dp-diffusion"], f"--base: {MISSING}"),
        ([*METHOD, "--set", "private.trainable=['nothing*']"], "--set private.trainable"),
        ([*METHOD, "--set", "generation.guidance=2"], "--set generation.guidance=2"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    environment: dict[str, str], digits: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run("train-private", *arguments, "--private", digits, *BUDGET, "--out", tmp_path / "m", env=environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_unlabelled_images_need_no_classes(environment: dict[str, str], digits: Path, tmp_path: Path) -> None:
    plain, model = tmp_path / "plain.npz", tmp_path / "m"
    np.savez(plain, images=np.load(digits)["images"])
    done = run("train-private", *METHOD, "--private", plain, *BUDGET, "--out", model, env=environment)
    assert done.returncode == 0, done.stderr
    bundle = Bundle.open(model, "model", "private")
    assert bundle.classes == ()
    assert bundle.component("denoiser", Denoiser).class_table.weight.shape[0] == 1


def test_the_overlap_check_is_for_public_images() -> None:
    facts = PublicFacts(1000, ("0", "1"), (32, 32))
    scratch, tuned = (
        build_settings(DpDiffusionSettings, SCRATCH, [f"denoiser.pretrained={on}"]) for on in ("false", "true")
    )
    # plan assumes the base that fine-tuning needs
    assert [spec.name for spec in releases(scratch, facts, None)] == ["denoiser"]
    assert [spec.name for spec in releases(tuned, facts, None)] == ["overlap", "denoiser"]
    with pytest.raises(InputError, match=r"private\.trainable"):
        releases(
            build_settings(DpDiffusionSettings, SCRATCH, ["denoiser.pretrained=false", "private.trainable=['no*']"]),
            facts,
            None,
        )
