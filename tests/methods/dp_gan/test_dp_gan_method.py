"""The method as a user meets it: presets, train, generate, audit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY
from tests_process import run
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.data import ImageSet, load_images
from rapid.data.private import PrivateImages
from rapid.dp import PublicFacts
from rapid.dp.accounting import rdp_epsilon
from rapid.methods import apply_overrides, find_method, load_settings
from rapid.methods.base import Inspectable
from rapid.methods.dp_gan.generator import DpGanGenerator
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.nn.gan import GanGenerator
from rapid.sampling.generate import generate
from rapid.stages.audited import audit_stage
from rapid.stages.private import train_private_bundle

CPU = torch.device("cpu")
TREE = {"method": "dp-gan"} | TINY["dp-gan"]["settings"]


@pytest.fixture(scope="module")
def model(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on 100 digits."""
    out = tmp_path_factory.mktemp("gan") / "model"
    found = train_private_bundle(
        None, PrivateImages(digits), out, apply_overrides(TREE, []), epsilon=5.0, delta=1e-3, device=CPU, resume=False
    )
    assert found is not None
    return out


# Images of the training set, delta, noise multiplier; one in so many images in a batch, steps, epsilon by RDP
ACCOUNTED = [
    ("dp-gan-mnist", 60_000, 1e-5, 2.0, 118, 174_000, 9.995),
    ("dp-gan-mnist-epsilon1", 60_000, 1e-5, 14.0, 118, 165_000, 0.996),
    ("dp-gan-mnist-fixed128", 60_000, 1e-5, 1.0, 469, 450_000, 9.963),
    ("dp-gan-mnist-fixed2048", 60_000, 1e-5, 5.6, 30, 98_000, 9.946),
    ("dp-gan-celeba32", 182_637, 1e-6, 4.0, 90, 385_000, 9.984),
]


@pytest.mark.parametrize(("preset", "size", "delta", "noise", "batches", "steps", "epsilon"), ACCOUNTED)
def test_presets_spend_what_the_paper_spends(
    preset: str, size: int, delta: float, noise: float, batches: int, steps: int, epsilon: float
) -> None:
    """By its Renyi accounting, with its noise and its images; 1 / ceil(N / B) is its rate."""
    chosen = load_settings(preset)
    assert chosen.private.steps == steps
    assert size / chosen.private.expected_batch == pytest.approx(batches, rel=1e-3)
    (spec,) = find_method("dp-gan").releases(chosen, PublicFacts(size, ("a", "b"), (28, 28)), None)
    found = rdp_epsilon([spec.event(noise)], delta)
    assert found == pytest.approx(epsilon, rel=2e-3)
    assert found <= round(epsilon)


@pytest.mark.parametrize(("preset", "every"), [("dp-gan-mnist-fixed128", 50), ("dp-gan-mnist-fixed2048", 20)])
def test_fixed_runs_differ_from_the_adaptive_one_in_the_private_stage_alone(preset: str, every: int) -> None:
    """Table 6: n_D."""
    fixed, adaptive = load_settings(preset), load_settings("dp-gan-mnist")
    assert isinstance(fixed, DpGanSettings)
    assert isinstance(adaptive, DpGanSettings)
    assert fixed.private.discriminator_steps == every
    changed = {name: getattr(adaptive.private, name) for name in ("expected_batch", "steps", "discriminator_steps")}
    own = fixed.private.model_copy(update=changed)
    assert fixed.model_copy(update={"private": own, "preset": adaptive.preset}) == adaptive


def test_presets_have_the_numbers_of_the_paper() -> None:
    mnist, celeba = load_settings("dp-gan-mnist"), load_settings("dp-gan-celeba32")
    method = find_method("dp-gan")
    assert [round(method.trained_parameters(*one) / 1e6, 2) for one in ((mnist, 10), (celeba, 2))] == [1.72, 2.64]
    for chosen in (mnist, celeba):
        assert isinstance(chosen, DpGanSettings)
        own = chosen.private
        assert (own.learning_rate, own.generator_learning_rate, own.beta1, own.beta2) == (2e-4, 2e-4, 0.5, 0.999)
        assert (own.clip_norm, own.ema_decay, own.discriminator_steps, own.mode_seeking) == (1, 0, None, 0)
        assert (own.controller.floor, own.controller.decay) == (0.6, 0.99)


def test_the_small_preset_has_the_defaults() -> None:
    assert load_settings("dp-gan-small") == apply_overrides({"method": "dp-gan", "preset": "dp-gan-small"}, [])


def test_the_bundle_is_complete(model: Path) -> None:
    privacy = json.loads((model / "privacy.json").read_text())
    assert privacy["method"] == "dp-gan"
    assert privacy["epsilon"] <= 5
    (release,) = privacy["releases"]
    assert (release["name"], release["steps"]) == ("discriminator", 6)
    assert "post-processing" in privacy["notes"][0]
    assert json.loads((model / "model_index.json").read_text())["generator"] == ["rapid.nn.gan", "GanGenerator"]
    # the discriminator stays at home
    assert [path.name for path in model.rglob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]
    assert "class-conditional GAN" in (model / "README.md").read_text()


def make(model: Path, batch_size: int = 256) -> DpGanGenerator:
    bundle = Bundle.open(model, "model", "private")
    settings = bundle.settings_as(DpGanSettings).generation.model_copy(update={"batch_size": batch_size})
    found = find_method("dp-gan").generator(bundle, CPU, settings)
    assert isinstance(found, DpGanGenerator)
    return found


def test_image_n_of_a_seed_does_not_depend_on_the_batch(model: Path) -> None:
    whole = generate(make(model), 13, seed=11)
    assert whole.images.shape == (13, 28, 28)
    assert whole.images.tobytes() == generate(make(model), 13, seed=11).images.tobytes()
    for size in (1, 4):
        parts = generate(make(model, size), 13, seed=11)
        assert_same_images(parts.images, whole.images)
    assert (generate(make(model), 13, seed=12).images != whole.images).any()


def test_an_image_takes_one_network_call(model: Path) -> None:
    generator = make(model)
    calls = []
    network = generator._network
    assert isinstance(network, GanGenerator)
    network.register_forward_hook(lambda *_: calls.append(1))
    generate(generator, 5, seed=1)
    assert len(calls) == generator.calls() == 1


def test_it_trains_and_generates_on_the_command_line(digits: Path, tmp_path: Path) -> None:
    words = ["discriminator.channels=4", "generator.channels=4", "private.expected_batch=20", "private.steps=3"]
    done = run("train-private", "--method", "dp-gan", "--private", digits, "--epsilon", 5, "--out", tmp_path / "m",
               *(part for word in words for part in ("--set", word)))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "differentially private" in done.stdout
    out = tmp_path / "images.npz"
    done = run("generate", "--model", tmp_path / "m", "--count", 20, "--out", out, "--seed", 1)
    assert done.returncode == 0, done.stderr
    made = np.load(out)
    assert made["images"].shape == (20, 28, 28)
    assert made["labels"].tolist() == [*range(10)] * 2


def test_its_private_stage_is_audited() -> None:
    """The audit sees what the mechanism released, without the fakes that are added to it."""
    settings = apply_overrides(TREE, ["private.steps=4", "private.expected_batch=10"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = audit_stage(None, settings, epsilon=3.0, delta=1e-3, canaries=40, confidence=0.9999)
    assert found.releases == ("discriminator",)
    assert not found.refuted
    assert found.power["discriminator"].noise < 0.05


def test_what_a_release_inspects(model: Path, digits: Path) -> None:
    method, bundle = find_method("dp-gan"), Bundle.open(model, "model", "private")
    assert isinstance(method, Inspectable)
    for subject in method.audited(bundle):
        assert subject.losses(torch.tensor([0, 3])).shape == (2,)
    # an image of the generator itself is nearer to what it makes than a real one
    made = generate(make(model), 20, seed=0)
    assert made.labels is not None
    own = ImageSet(made.images, made.labels, bundle.classes, "made")
    real = load_images(digits, "real")
    ((_, near),) = method.membership_scores(bundle, own, CPU).items()
    ((_, far),) = method.membership_scores(bundle, real, CPU).items()
    assert near.shape == (20,)
    assert near.min() > far.max()
