"""What is measured on public images, against numpy and by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import linalg

from rapid.bundle import Bundle
from rapid.config.sections import AutoencoderSettings
from rapid.data import fit_images, load_images, sample_path, to_unit_range
from rapid.data.augmented import AugmentedImages
from rapid.methods.rapid.diagnosis import (
    Contrast,
    Floor,
    Searched,
    autoencoder_frechet,
    autoencoder_psnr,
    encoder_loss,
    findings,
    probe_accuracy,
    retrieval_works,
)
from rapid.methods.rapid.networks import AutoencoderRecipe, train_autoencoder
from rapid.methods.rapid.retrieval import Recall, RetrievalAccuracy
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe
from rapid.training import Checkpoint

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
    rows, columns = (np.flatnonzero(images.max(0).max(axis)) for axis in (1, 0))
    # the letters without the frame that padding made
    within = len(images) * (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    assert within < images.size
    error = ((decoded - (images / 127.5 - 1)) ** 2).sum() / within
    assert public.config.facts["quality"]["autoencoder_psnr"] == pytest.approx(10 * math.log10(4 / error), abs=0.01)


def test_an_autoencoder_that_loses_nothing() -> None:
    pixels = Autoencoder({"kind": "none", "latent_channels": 1, "patch": 1})
    assert autoencoder_psnr(pixels, np.zeros((3, 8, 8), np.uint8), CPU) == math.inf


@pytest.mark.parametrize("colours", [1, 3])
def test_a_frame_that_all_images_have_does_not_raise_the_psnr(colours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pixel of the images is off by 10 of 255, those of the frame by nothing."""
    pixels = np.random.default_rng(0).integers(1, 240, (30, 9, 10, colours)).astype(np.uint8)
    pixels = pixels[..., 0] if colours == 1 else pixels
    around = [(0, 0), (3, 4), (6, 0), *[(0, 0)] * (pixels.ndim - 3)]
    nothing = Autoencoder({"kind": "none", "latent_channels": colours, "patch": 1})
    monkeypatch.setattr(nothing, "encode", lambda x: torch.where(x > -1, x + 10 / 127.5, x))
    expected = pytest.approx(20 * math.log10(255 / 10), abs=1e-3)
    assert autoencoder_psnr(nothing, pixels, CPU) == expected
    assert autoencoder_psnr(nothing, np.pad(pixels, around), CPU) == expected


@pytest.fixture(scope="module")
def other_letters(tiny_settings: RapidSettings) -> NDArray[np.uint8]:
    """Letters in random order."""
    images = fit_images(load_images(sample_path("letters"), "-"), tiny_settings.image, "-").images
    return images[np.random.default_rng(0).permutation(len(images))[:800]]


def by_scipy(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The Frechet distance by a matrix square root."""
    c1, c2 = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    root = linalg.sqrtm(c1 @ c2).real
    return float(np.square(first.mean(0) - second.mean(0)).sum() + np.trace(c1 + c2 - 2 * root))


def test_the_floor_of_latents_in_features(
    public: Bundle, other_letters: NDArray[np.uint8], tmp_path: Path, tiny_settings: RapidSettings
) -> None:
    """Against scipy, on images that are decoded here; and the fewer the numbers of a latent, the larger it is."""
    probe = public.component("probe", Probe)
    half = len(other_letters) // 2
    own = other_letters[half:]
    distances = []
    for count in (8, 2, 1):
        settings = AutoencoderSettings(kind="linear", patch=4, latent_channels=count)
        augment = tiny_settings.encoder.augment
        recipe = AutoencoderRecipe(images="", image=tiny_settings.image, views=0, augment=augment, autoencoder=settings)
        views = AugmentedImages(other_letters[:half], np.zeros(half, np.int64), 0, augment, CPU)
        model = train_autoencoder(recipe, views, CPU, Checkpoint(tmp_path / "state"))
        found = autoencoder_frechet(model, probe, own, CPU)
        assert found is not None
        with torch.no_grad():
            decoded = model.decode(model.encode(to_unit_range(own))).clamp(-1, 1)
            pixels = ((decoded + 1) * 127.5).round() / 127.5 - 1
            real, made = (probe.features(x).double().numpy()[:, :-1] for x in (to_unit_range(own), pixels))
        assert found.decoded == pytest.approx(by_scipy(real, made), rel=1e-3, abs=1e-6)
        distances.append(found.decoded)
    assert distances == sorted(distances)
    assert distances[0] < 0.5 * distances[1] < 0.5 * distances[2]


def test_an_autoencoder_that_loses_nothing_has_no_floor(public: Bundle, other_letters: NDArray[np.uint8]) -> None:
    probe, pixels = public.component("probe", Probe), Autoencoder({"kind": "none", "latent_channels": 1, "patch": 1})
    found = autoencoder_frechet(pixels, probe, other_letters, CPU)
    assert found is not None
    assert found.decoded == pytest.approx(0, abs=1e-9)
    # halves of one set are apart by their number alone: half as many are about twice as far
    fewer = autoencoder_frechet(pixels, probe, other_letters[:400], CPU)
    assert fewer is not None
    assert 1e-4 < found.halves < fewer.halves < 4 * found.halves
    assert autoencoder_frechet(pixels, probe, other_letters[:3], CPU) is None
    assert autoencoder_frechet(pixels, probe, other_letters[:4], CPU) is not None


def test_the_floor_is_in_the_facts(public: Bundle, letters: Path, tiny_settings: RapidSettings) -> None:
    reference = np.load(public.path / "split.npz")["reference"]
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-").images[reference]
    found = autoencoder_frechet(
        public.component("autoencoder", Autoencoder), public.component("probe", Probe), images, CPU
    )
    assert found is not None
    assert public.config.facts["quality"]["autoencoder_frechet"] == pytest.approx(found._asdict(), rel=1e-3, abs=1e-5)
    assert f"distance {found.decoded:.4f} from themselves" in public.config.facts["findings"][1]


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


@pytest.mark.parametrize(
    ("classes", "good", "bad"), [(2, 0.7, 0.6), (3, 0.6, 0.4), (10, 0.21, 0.19), (100, 0.021, 0.019)]
)
def test_few_classes_leave_room_above_chance(classes: int, good: float, bad: float) -> None:
    for rate, works in ((1.0, True), (good, True), (bad, False)):
        said = findings(33.0, None, None, Contrast(rate, 1 / classes), steps=1000)[-1]
        assert ("tell little" not in said) is works
        assert retrieval_works(RetrievalAccuracy(10_000, rate, 0.1, 1 / classes)) or not works


def test_what_does_not_work_is_said() -> None:
    searched = Searched(100, Contrast(5.54, 5.54), RetrievalAccuracy(2000, 0.011, 0.05, 0.010), None)
    bad = findings(19.7, Floor(0.31, 0.02), searched, Contrast(0.02, 0.015), steps=3)
    words = (
        "latent_channels", "distance 0.3100 from themselves", "3 steps of training are too few",
        "by chance 5.54: it tells no two trajectories apart; train it longer", "finds nothing",
        "train it longer",
    )  # fmt: skip
    for line, word in zip(bad, words, strict=True):
        assert word in line
    # nothing is advised that given networks do not allow
    given = findings(19.7, Floor(0.31, 0.02), searched, Contrast(0.02, 0.015), steps=None)
    assert not re.search("latent_channels|retrieval.k|train it longer|too few", "\n".join(given))
    assert "apart" not in findings(33.0, None, Searched(100, Contrast(5.1, 5.54), None, None), None, steps=200)[1]
    good = findings(33.0, None, Searched(100, None, None, None), Contrast(0.5, 0.01), steps=200)
    assert len(good) == 2
    assert "coarse" not in good[0]
    assert "train" not in good[1]


def test_retrieval_that_is_off_is_said() -> None:
    assert [line.split(":")[0] for line in findings(33.0, None, None, None, steps=200)] == ["autoencoder", "retrieval"]
    assert "off (retrieval.enabled)" in findings(33.0, None, None, None, steps=200)[1]


@pytest.mark.parametrize(("share", "advice"), [(0.85, True), (0.93, False)])
def test_recall_of_an_approximate_index_is_said(share: float, advice: bool) -> None:
    line = findings(33.0, None, Searched(100, None, None, Recall(200, 10, share)), None, steps=200)[-1]
    assert line.startswith(f"index: finds {share:.1%} of the 10 nearest records of 200 queries")
    assert ("index_type=flat" in line) is advice


def test_the_lines_are_on_the_card_and_in_the_facts(public: Bundle) -> None:
    lines = public.config.facts["findings"]
    assert len(lines) == 6
    card = (public.path / "README.md").read_text()
    assert all(f"- {line}" in card for line in lines)
