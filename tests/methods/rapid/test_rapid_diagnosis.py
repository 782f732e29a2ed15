"""What is measured on public images, against numpy and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rapid.bundle import Bundle
from rapid.data import fit_images, load_images, to_unit_range
from rapid.methods.rapid.diagnosis import (
    Contrast,
    autoencoder_psnr,
    encoder_loss,
    findings,
    probe_accuracy,
    retrieval_works,
)
from rapid.methods.rapid.retrieval import Recall, RetrievalAccuracy
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def public(public_bundle: Path) -> Bundle:
    return Bundle.open(public_bundle, "base")


def test_the_floor_of_the_autoencoder(public: Bundle, letters: Path, tiny_settings: RapidSettings) -> None:
    reference = np.load(public.path / "split.npz")["reference"]
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-").images[reference]
    model = public.component("autoencoder", Autoencoder)
    with torch.no_grad():
        decoded = model.decode(model.encode(to_unit_range(images))).clamp(-1, 1).numpy()[:, 0]
    error = ((decoded - (images / 127.5 - 1)) ** 2).mean()
    assert public.config.facts["quality"]["autoencoder_psnr"] == pytest.approx(10 * math.log10(4 / error), abs=0.01)


def test_an_autoencoder_that_loses_nothing() -> None:
    pixels = Autoencoder({"kind": "none", "latent_channels": 1, "patch": 1})
    assert autoencoder_psnr(pixels, np.zeros((3, 8, 8), np.uint8), CPU) == math.inf


def test_an_untrained_encoder_is_near_chance(public: Bundle, letters: Path, tiny_settings: RapidSettings) -> None:
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-").images
    models = (
        public.component("autoencoder", Autoencoder),
        public.component("denoiser", Denoiser),
        TrajectoryEncoder.build(tiny_settings),
    )
    hot = tiny_settings.model_copy(update={"encoder": tiny_settings.encoder.model_copy(update={"temperature": 1000.0})})
    found = encoder_loss(hot, models, images, CPU)
    assert found is not None
    # similarities hardly differ at this temperature, so every candidate is as likely
    assert found.value == pytest.approx(found.chance, abs=1e-3)
    assert found.chance == pytest.approx(math.log(2 * min(len(images), tiny_settings.encoder.training.batch_size) - 1))
    assert encoder_loss(tiny_settings, models, images[:1], CPU) is None


def test_the_probe_by_hand(public: Bundle, letters: Path, tiny_settings: RapidSettings) -> None:
    reference = np.load(public.path / "split.npz")["reference"]
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-")
    assert images.labels is not None
    own, labels = images.images[reference], images.labels[reference]
    probe = public.component("probe", Probe)
    found = probe_accuracy(probe, own, labels, CPU)
    with torch.no_grad():
        features = probe.features(to_unit_range(own)).double().numpy()[:, :-1]
    prototypes = probe.prototypes.double().numpy()
    hits = 0
    for row, label in zip(features, labels, strict=True):
        cosines = [p[:-1] @ row / np.linalg.norm(p[:-1]) if p[-1] else -math.inf for p in prototypes]
        hits += int(np.argmax(cosines) == label)
    assert found.value == pytest.approx(hits / len(own))
    assert found.chance == pytest.approx(np.bincount(labels).max() / len(labels))


@pytest.mark.parametrize(("top1", "works"), [(0.011, False), (0.0149, False), (0.02, True), (0.8, True)])
def test_when_retrieval_works(top1: float, works: bool) -> None:
    """With 2,000 queries and chance 0.010, the standard error is 0.0022."""
    assert retrieval_works(RetrievalAccuracy(2000, top1, 0.1, 0.010)) is works


def test_what_does_not_work_is_said() -> None:
    bad = findings(19.7, Contrast(5.54, 5.54), RetrievalAccuracy(2000, 0.011, 0.05, 0.010), Contrast(0.02, 0.015))
    assert len(bad) == 4
    for line, word in zip(bad, ("latent_channels", "by chance", "finds nothing", "train it longer"), strict=True):
        assert word in line
    good = findings(33.0, None, None, Contrast(0.5, 0.01))
    assert len(good) == 2
    assert "coarse" not in good[0]
    assert "train" not in good[1]


@pytest.mark.parametrize(("share", "advice"), [(0.85, True), (0.93, False)])
def test_recall_of_an_approximate_index_is_said(share: float, advice: bool) -> None:
    line = findings(33.0, None, None, None, Recall(200, 10, share))[-1]
    assert line.startswith(f"index: finds {share:.1%} of the 10 nearest records of 200 queries")
    assert ("index_type=flat" in line) is advice


def test_the_lines_are_on_the_card_and_in_the_facts(public: Bundle) -> None:
    lines = public.config.facts["findings"]
    assert len(lines) == 4
    card = (public.path / "README.md").read_text()
    assert all(f"- {line}" in card for line in lines)
