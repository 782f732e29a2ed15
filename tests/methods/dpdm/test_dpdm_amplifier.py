"""DPDM's public stage: an EDM of a few public images that makes more of them, for the warm-up of a classifier."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY
from safetensors.torch import load_file
from tests_process import Program, run

from rapid.bundle import Bundle
from rapid.config.presets import preset_names
from rapid.methods import apply_overrides, load_settings, open_generator
from rapid.methods.dpdm.generator import DpdmGenerator
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.sampling.generate import generate
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")
SETTINGS = TINY["dpdm"]["settings"] | {"method": "dpdm"}
BUILD = ["build-kb", "--method", "dpdm"]
SIZE = [
    "--set", "network={patch: 4, channels: 8, multipliers: [1], attention: [false], heads: 1}",
    "--set", "public.training.batch_size=8",
]  # fmt: skip


def tiny(*overrides: str) -> DpdmSettings:
    found = apply_overrides(SETTINGS, overrides)
    assert isinstance(found, DpdmSettings)
    return found


@pytest.fixture(scope="module")
def spots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images of two classes that differ in their place and in nothing else."""
    random = np.random.default_rng(0)
    images = np.zeros((40, 16, 16), np.uint8)
    labels = np.arange(40) % 2
    for image, label in zip(images, labels, strict=True):
        row = random.integers(3, 8)
        image[row : row + 5, 1:6] = 255
        if label:
            image[:] = image[:, ::-1]
    file = tmp_path_factory.mktemp("spots") / "spots.npz"
    np.savez(file, images=images, labels=labels, classes=np.array(["left", "right"]))
    return file


def test_it_makes_images_of_the_class_that_is_asked_for(spots: Path, tmp_path: Path) -> None:
    settings = tiny(
        "image.size=16", "network.channels=16", "public.training={steps: 200, batch_size: 32, ema_decay: 0.98}"
    )
    bundle = build_public_bundle([spots], tmp_path / "few", settings, CPU, resume=False)
    assert bundle.config.facts["configuration"] == "edm"
    generator = open_generator(bundle.path, "cpu", ["generation.steps=10"])
    assert isinstance(generator, DpdmGenerator)
    # as in EDM, not as the paper of DPDM found best for a private model
    assert (generator.tuned.guidance, generator.tuned.churn.amount) == (0, 0)
    made = generate(generator, 40, labels=[0, 1] * 20, seed=3).images.astype(float)
    left, right = made[:, :, :8].mean((1, 2)), made[:, :, 8:].mean((1, 2))
    assert (left[0::2] > right[0::2]).mean() > 0.9
    assert (right[1::2] > left[1::2]).mean() > 0.9


def test_a_stopped_stage_goes_on_to_the_same_weights(letters: Path, tmp_path: Path) -> None:
    more = [*SIZE, "--set", "public.training.steps=300", "--public", letters]
    alone = run(*BUILD, *more, "--out", tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    assert f"next: rapid generate --model {tmp_path / 'alone'} " in alone.stdout
    child = Program(*BUILD, *more, "--out", tmp_path / "out")
    shown = ""
    while "denoiser  " not in shown:
        character = child.stderr.read(1)
        assert character, shown
        shown += character
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert not (tmp_path / "out" / "config.json").exists()
    resumed = run(*BUILD, *more, "--out", tmp_path / "out", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    first, second = (load_file(next((tmp_path / name / "denoiser").glob("*.safetensors"))) for name in ("alone", "out"))
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-5)


def test_from_a_few_images_to_a_warm_classifier(digits: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.npz"
    with np.load(digits) as found:
        np.savez(few, images=found["images"][:30], labels=found["labels"][:30], classes=found["classes"])
    edm, more, base, model = (tmp_path / name for name in ("edm", "more.npz", "base", "model"))
    tree = TINY["dp-classifier"]["settings"]
    classifier = [
        word
        for section, settings in tree.items()
        for name, value in settings.items()
        for word in ("--set", f"{section}.{name}={json.dumps(value)}")
    ]
    for command in (
        [*BUILD, *SIZE, "--set", "public.training.steps=3", "--public", few, "--out", edm],
        ["generate", "--model", edm, "--count", 60, "--labels", "all", "--set", "generation.steps=3", "--out", more],
        ["build-kb", "--method", "dp-classifier", "--public", few, "--public", more, "--out", base, *classifier],
        ["train-private", "--base", base, "--private", digits, "--epsilon", 8, "--out", model],
    ):
        done = run(*command, env=os.environ | {"RAPID_LEDGER": str(tmp_path / "ledger.jsonl")})
        assert done.returncode == 0, done.stderr
    with np.load(more) as found:
        assert found["images"].shape == (60, 32, 32)
        assert set(np.bincount(found["labels"])) == {6}
    assert Bundle.open(model, "model").classes == tuple("0123456789")
    assert json.loads((base / "config.json").read_text())["public"]["pre_training"] == 90


def test_private_training_refuses_it_as_a_base(letters: Path, digits: Path, tmp_path: Path) -> None:
    base = build_public_bundle([letters], tmp_path / "edm", tiny(), CPU, resume=False).path
    out = tmp_path / "out"
    done = run("train-private", "--base", base, "--private", digits, "--epsilon", 8, "--out", out)
    assert done.returncode == 2
    assert done.stderr == f"rapid: --base {base}: dpdm trains without public images; leave it out\n"
    assert not out.exists()


def test_unlabelled_images(letters: Path, tmp_path: Path) -> None:
    with np.load(letters) as found:
        np.savez(tmp_path / "plain.npz", images=found["images"])
    base = build_public_bundle([tmp_path / "plain.npz"], tmp_path / "edm", tiny(), CPU, resume=False)
    assert base.classes == ()
    assert generate(open_generator(base.path, "cpu"), 3, seed=1).images.shape == (3, 32, 32)


def test_its_presets() -> None:
    assert {"edm-small", "edm-cifar10"} <= set(preset_names())
    cifar = load_settings("edm-cifar10")
    assert isinstance(cifar, DpdmSettings)
    # EDM's sampler for CIFAR-10: 18 levels, and Heun's method in all steps but the last
    assert (cifar.generation.sampler, cifar.generation.steps) == ("churn", 18)
    assert cifar.public.sigma_data == 0.5
