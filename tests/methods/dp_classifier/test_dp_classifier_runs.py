"""Warm-up, private training and predictions, in the real stages, on a few digits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY
from torch.nn import functional as F

from rapid.bundle import Bundle
from rapid.data import load_images, to_unit_range
from rapid.data.private import PrivateImages
from rapid.data.views import DRAWS
from rapid.dp.access import PublicFacts
from rapid.dp.audit import StepAudit
from rapid.dp.randomness import Randomness
from rapid.errors import InputError
from rapid.methods import apply_overrides, generator_of, open_classifier, open_model
from rapid.methods.dp_classifier.images import LabelledImages
from rapid.methods.dp_classifier.private_stage import ViewLosses, releases
from rapid.methods.dp_classifier.public_gradient import PublicGradient
from rapid.methods.dp_classifier.public_stage import _draw
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.nn.wide_resnet import WideResNet
from rapid.stages.audited import audit_stage
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")
TREE = TINY["dp-classifier"]["settings"] | {"method": "dp-classifier"}


def tiny(*overrides: str) -> DpClassifierSettings:
    found = apply_overrides(TREE, overrides)
    assert isinstance(found, DpClassifierSettings)
    return found


def part(source: Path, target: Path, rows: slice) -> Path:
    with np.load(source) as found:
        np.savez(target, images=found["images"][rows], labels=found["labels"][rows], classes=found["classes"])
    return target


def trained(out: Path, digits: Path, settings: DpClassifierSettings, base: Path | None = None) -> Path:
    found = train_private_bundle(
        base, PrivateImages(digits), out, settings, epsilon=8.0, delta=None, device=CPU, resume=False
    )
    assert found is not None
    return found.path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """A warm-up on two sets of the same classes, as a few real images and synthetic ones are."""
    folder = tmp_path_factory.mktemp("base")
    sets = [part(digits, folder / "few.npz", slice(0, 30)), part(digits, folder / "synthetic.npz", slice(30, 70))]
    return build_public_bundle(sets, folder / "base", tiny("warmup.kept=20"), CPU, resume=False).path


def test_an_override_leaves_its_neighbours_as_they_are() -> None:
    found = apply_overrides({"method": "dp-classifier"}, ["warmup.training.steps=7", "private.views.shift=1"])
    assert isinstance(found, DpClassifierSettings)
    assert found.warmup.training.learning_rate == DpClassifierSettings().warmup.training.learning_rate == 0.1
    assert found.private.views.rotate == DpClassifierSettings().private.views.rotate == 8


def test_sets_that_share_classes_are_joined(base: Path) -> None:
    bundle = Bundle.open(base, "model", "public")
    classifier = open_classifier(base, "cpu")
    assert classifier.classes == tuple("0123456789")
    kept = bundle.component("public_images", LabelledImages)
    assert kept.images.shape == (20, 32, 32)
    assert set(kept.labels) <= set("0123456789")


def test_a_private_run_from_scratch(classifier_bundle: Path, digits: Path) -> None:
    """One release, a statement, a card of a classifier; probabilities are those of the stored network."""
    cold = classifier_bundle
    privacy = json.loads((cold / "privacy.json").read_text())
    assert [release["name"] for release in privacy["releases"]] == ["classifier"]
    assert privacy["epsilon"] <= 8
    card = (cold / "README.md").read_text()
    assert "image-classification" in card
    assert "rapid generate" not in card
    images = load_images(digits, "data").images
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    classifier = open_classifier(cold, "cpu")
    found = classifier.probabilities(padded)
    network = Bundle.open(cold, "model").component("classifier", WideResNet)
    with torch.no_grad():
        expected = network(to_unit_range(padded)).softmax(1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert classifier.probabilities(padded[:0]).shape == (0, 10)
    assert type(open_model(cold, "cpu")) is type(classifier)
    with pytest.raises(InputError, match="makes no images; use rapid predict"):
        generator_of(Bundle.open(cold, "model"), CPU)


def test_a_private_run_starts_from_the_warm_up(base: Path, digits: Path, tmp_path: Path) -> None:
    """With a learning rate of almost nothing the weights stay: the private stage begins where the public one ended."""
    model = trained(tmp_path / "warm", digits, tiny("private.learning_rate=1e-12"), base)
    before = Bundle.open(base, "model").component("classifier", WideResNet)
    after = Bundle.open(model, "model").component("classifier", WideResNet)
    for name, weight in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def test_public_images_of_other_classes_are_refused(base: Path) -> None:
    """They would have no gradient, and the private one would be made smaller."""
    own, public = tiny("private.public_share=0.25", "private.public_batch=6"), Bundle.open(base, "base", "public")
    with pytest.raises(InputError, match="no public image that --base keeps is of a class of the private ones"):
        releases(own, PublicFacts(100, ("x", "y"), (32, 32)), public)


def test_all_sets_are_drawn_from_equally_often() -> None:
    groups = [torch.full((3,), number) for number in range(3)]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([_draw(groups, 2, generator) for _ in range(600)])
    assert torch.bincount(drawn).tolist() == pytest.approx([400] * 3, abs=60)
    assert torch.bincount(_draw(groups, 7, generator)).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_public_gradients_are_mixed_in(base: Path, digits: Path, tmp_path: Path) -> None:
    """A whole run with weight 0.25; and the mixture by hand, of the same public batch."""
    own = tiny("private.public_share=0.25", "private.public_batch=6")
    trained(tmp_path / "ext", digits, own, base)
    network = open_network(base)
    public = PublicGradient(Bundle.open(base, "model").component("public_images", LabelledImages), network, own)
    expected = public.at(3)
    norm = torch.stack([g.norm() for g in expected]).norm()
    assert 0 < norm <= own.private.clip_norm * (1 + 1e-5)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    public.mix_in(3)
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 0.75 + 0.25 * gradient)
    assert all(torch.equal(one, two) for one, two in zip(public.at(7), public.at(7), strict=True))


def test_the_audit_of_a_run_with_public_gradients_and_padded_batches_passes(
    base: Path, digits: Path, tmp_path: Path
) -> None:
    """It looks at the noisy sums, before public gradients are mixed in, and without the rows that pad a batch."""
    changes = ("private.public_share=0.25", "private.public_batch=6", "private.pad_batches=true")
    canaries = part(digits, tmp_path / "canaries.npz", slice(70, 100))
    arguments = {"epsilon": 4.0, "delta": 1e-5, "canaries": 30, "images": canaries, "confidence": 1 - 1e-6}
    found = audit_stage(base, tiny("private.expected_batch=10", *changes), **arguments)
    # few false alarms: this runs often
    assert StepAudit(found.tests.findings, 0.0, 1e-7).deviations == []
    assert found.bound <= 4


def open_network(path: Path) -> WideResNet:
    return Bundle.open(path, "model").component("classifier", WideResNet)


def test_losses_are_those_of_single_rows(base: Path, digits: Path) -> None:
    network = open_network(base)
    losses = ViewLosses(tiny(), network, Randomness())
    images = torch.from_numpy(np.pad(load_images(digits, "data").images[:4], ((0, 0), (2, 2), (2, 2))))
    labels, draws = torch.tensor([1, 0, 3, 9]), torch.rand(4, DRAWS, dtype=torch.float64)
    together = losses.losses(images, labels, draws)
    for row in range(4):
        alone = losses.losses(images[row : row + 1], labels[row : row + 1], draws[row : row + 1])
        torch.testing.assert_close(alone[0], together[row])
    plain = ViewLosses(tiny("private.views={rotate: 0, scale: 0, shift: 0}"), network, Randomness())
    expected = F.cross_entropy(network(to_unit_range(images.numpy())), labels, reduction="none")
    torch.testing.assert_close(plain(images, labels), expected)


@pytest.mark.parametrize(
    ("overrides", "classes", "field", "words"),
    [
        ((), (), "private", "has no labels"),
        (("private.expected_batch=101",), ("a",), "private.expected_batch", "larger than the private set"),
        (("private.public_share=0.5",), ("a",), "private.public_share", "needs public images"),
        (("private.trainable=['nothing*']",), ("a",), "private.trainable", "no parameter matches"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_spent(
    overrides: tuple[str, ...], classes: tuple[str, ...], field: str, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        releases(tiny(*overrides), PublicFacts(100, classes, (32, 32)), None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("network.depth=12", "6 n"),
        ("private.views={border: reflect, shift: 40}", "less than image.size"),
        ("warmup.rho=-1", "must be at least"),
    ],
)
def test_bad_settings_are_named(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tiny(override)
