"""WarmSyn on the command line: images that another method's private model generates are the base of a classifier."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY, flags

from rapid.bundle import Bundle
from rapid.cli import main
from rapid.data.private import PrivateImages
from rapid.methods import apply_overrides
from rapid.methods.dp_classifier.images import LabelledImages
from rapid.nn.wide_resnet import WideResNet
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")
CLASSES = tuple("0123456789")


def rapid(*arguments: object) -> None:
    assert main([str(one) for one in arguments]) == 0


@pytest.fixture(scope="module", params=["dp-diffusion", "dp-gan", "dpdm"])
def generated(
    request: pytest.FixtureRequest, letters: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """40 images of a tiny private model of digits."""
    folder, tiny = tmp_path_factory.mktemp(request.param), TINY[request.param]
    settings = apply_overrides(tiny["settings"] | (tiny["public"] or {}) | {"method": request.param}, [])
    base = None
    if tiny["public"] is not None:
        base = build_public_bundle([letters], folder / "base", settings, CPU, resume=False).path
    train_private_bundle(
        base, PrivateImages(digits), folder / "model", settings, epsilon=10.0, delta=None, device=CPU, resume=False
    )
    target = folder / f"{request.param}.npz"
    rapid("generate", "--model", folder / "model", "--count", 40, "--labels", "all", "--out", target)
    return target


def test_generated_images_warm_a_classifier_up(generated: Path, digits: Path, tmp_path: Path) -> None:
    """Generated classes are the private ones by name: rows of the last layer go on, images are mixed in."""
    base, model, out = tmp_path / "base", tmp_path / "model", tmp_path / "predictions.csv"
    own = flags(TINY["dp-classifier"]["settings"])
    rapid("build-kb", "--method", "dp-classifier", "--public", generated, "--out", base, *own)
    with np.load(generated) as found:
        images, names = found["images"], found["classes"][found["labels"]]
        told = json.loads(found["rapid"].item())
    assert set(names) == set(CLASSES)
    opened = Bundle.open(base, "base", "public")
    warm, kept = opened.component("classifier", WideResNet), opened.component("public_images", LabelledImages)
    assert warm.classes == CLASSES
    assert [one.method for one in opened.origins] == [told["method"]] == [generated.stem]
    assert len(kept.images) == len(images) == 40
    # images of 28x28 are padded to 32x32
    margin = (32 - images.shape[1]) // 2
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))
    for image, name in zip(kept.images, kept.labels, strict=True):
        assert name in names[(padded == image).all((1, 2))]
    # so small a rate that a private row is the public one still, if it began as that
    more = ("--set", "private.learning_rate=1e-12", "--set", "private.public_share=0.25")
    rapid("train-private", "--base", base, "--private", digits, "--epsilon", 8, "--out", model, *more)
    classifier = Bundle.open(model, "model", "private")
    assert classifier.privacy is not None
    assert f"'model' ({told['method']}, epsilon 10, delta" in classifier.privacy["notes"][-1]
    trained = classifier.component("classifier", WideResNet)
    assert trained.classes == CLASSES
    torch.testing.assert_close(trained.head.weight, warm.head.weight, rtol=1e-5, atol=1e-6)
    assert trained.head.weight.norm(dim=1).min() > 0
    rapid("predict", "--model", model, "--data", digits, "--out", out)
    with out.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 100
    assert list(rows[0]) == ["image", "label", *(f"p({name})" for name in CLASSES)]
    assert {row["label"] for row in rows} <= set(CLASSES)
