"""Private training of the GAN against slow versions of Algorithm 1: gradients, sensitivity, generator, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data import ImageSet, to_unit_range
from rapid.dp import Budget, PrivateAccess, PublicFacts, Release
from rapid.dp.gradients import ROUNDING_MARGIN
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.dp_gan.fakes import FakeSide, adam, closeness, loss_of_real
from rapid.methods.dp_gan.private_stage import build_discriminator, build_generator, releases, train_private
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.nn.gan import GanDiscriminator, GanGenerator
from rapid.training import RunFolder

CPU = torch.device("cpu")
SIZE, CLASSES, LATENT, CLIP_NORM = 12, 3, 5, 0.05
SETTINGS: dict[str, Any] = {
    "method": "dp-gan",
    "image": {"size": 8},
    "discriminator": {"channels": 6},
    "generator": {"channels": 8, "latent": LATENT},
    "private": {
        "generator_learning_rate": 1e-3,
        "expected_batch": SIZE,
        "steps": 12,
        "clip_norm": CLIP_NORM,
        "physical_batch": 5,
    },
}


class Repeated:
    """A stream whose bytes depend on the number of the call alone; raises at the call `end`."""

    def __init__(self, calls: int = 0, end: int | None = None) -> None:
        self.calls, self._end = calls, end

    def __call__(self, count: int) -> bytes:
        if self.calls == self._end:
            raise KeyboardInterrupt
        self.calls += 1
        return np.random.default_rng(self.calls).bytes(count)


def settings_with(*overrides: str) -> DpGanSettings:
    chosen = apply_overrides(SETTINGS, overrides)
    assert isinstance(chosen, DpGanSettings)
    return chosen


def networks(settings: DpGanSettings) -> tuple[GanDiscriminator, GanGenerator]:
    torch.manual_seed(0)
    return build_discriminator(settings, CLASSES), build_generator(settings, CLASSES)


def image_set() -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, 8, 8), dtype=np.uint8)
    return ImageSet(pixels, np.arange(SIZE) % CLASSES, tuple("abc"), "private")


def fakes_of(generator: GanGenerator, stream: Repeated) -> tuple[Tensor, Tensor]:
    """SIZE fakes as the next draws of the stream give them, made one by one."""
    draws = Randomness(stream)
    latents = draws.normal(SIZE * LATENT).view(SIZE, LATENT)
    labels = (draws.uniform(SIZE) * CLASSES).ceil().long() - 1
    with torch.no_grad():
        return torch.cat([generator(latents[i : i + 1], labels[i : i + 1]) for i in range(SIZE)]), labels


def gradient(network: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]).double()


def clipped(vector: Tensor) -> Tensor:
    return vector * min(1.0, CLIP_NORM / (1 + ROUNDING_MARGIN) / float(vector.norm()))


def slow_sum(network: GanDiscriminator, images: Tensor, labels: Tensor, *, real: bool) -> Tensor:
    """Sum of clipped gradients of -log D or of -log(1 - D), one image at a time, from the probability itself."""
    total = torch.zeros(sum(p.numel() for p in network.parameters()), dtype=torch.float64)
    for i in range(len(images)):
        probability = torch.sigmoid(network(images[i : i + 1], labels[i : i + 1]))
        total += clipped(gradient(network, -torch.log(probability if real else 1 - probability).sum()))
    return total


def one_gradient(settings: DpGanSettings, present: Tensor | None = None) -> Tensor:
    """2 B times what Adam gets in the first step, without noise; all images are in the batch."""
    network, generator = networks(settings)
    images = image_set()
    assert images.labels is not None
    x, y = to_unit_range(images.images), torch.from_numpy(images.labels)
    weights = torch.ones(SIZE) if present is None else present
    (spec,) = releases(settings, PublicFacts.of(images))
    mechanism = PrivateMechanism(
        Release(spec=spec, noise_multiplier=0.0),
        network,
        lambda indices: loss_of_real(network, x[indices], y[indices]) * weights[indices],
        physical_batch=5,
    )
    fakes = FakeSide(generator, network, settings.private, Randomness(Repeated()))
    for parameter, part in zip(mechanism.parameters, mechanism.gradient(), strict=True):
        parameter.grad = part
    fakes.add_gradients()
    return 2 * SIZE * torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).double()


def test_the_gradient_is_that_of_algorithm_1() -> None:
    """Real images and fakes, each clipped by itself, over 2 B: against a loop on the same network."""
    settings = settings_with()
    network, generator = networks(settings)
    images = image_set()
    assert images.labels is not None
    real = slow_sum(network, to_unit_range(images.images), torch.from_numpy(images.labels), real=True)
    fake = slow_sum(network, *fakes_of(generator, Repeated()), real=False)
    found = one_gradient(settings)
    assert float((found - (real + fake)).norm()) < 1e-4 * CLIP_NORM * SIZE
    # neither part is idle
    assert min(float(real.norm()), float(fake.norm())) > CLIP_NORM


@pytest.mark.parametrize("number", [0, 7])
def test_an_image_more_moves_the_sum_by_at_most_clip_norm(number: int) -> None:
    settings = settings_with()
    present = torch.ones(SIZE)
    present[number] = 0
    moved = one_gradient(settings) - one_gradient(settings, present)
    assert 0.9 * CLIP_NORM < float(moved.norm()) <= CLIP_NORM
    # it is that image's clipped gradient, and nothing of the fakes
    network, images = networks(settings)[0], image_set()
    assert images.labels is not None
    x, y = to_unit_range(images.images)[number : number + 1], torch.from_numpy(images.labels)[number : number + 1]
    torch.testing.assert_close(moved, slow_sum(network, x, y, real=True), rtol=0, atol=1e-4 * CLIP_NORM)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_generator_steps_are_those_of_adam_on_the_non_saturating_loss(decay: float) -> None:
    """Two steps of plain Adam, and what the controller is told: the share of fakes that were recognised."""
    own = [f"private.ema_decay={decay}", "private.discriminator_steps=1", "private.mode_seeking=0"]
    settings = settings_with(*own)
    network, generator = networks(settings)
    _, expected = networks(settings)
    fakes = FakeSide(generator, network, settings.private, Randomness(Repeated()))
    optimizer = torch.optim.Adam(expected.parameters(), lr=1e-3, betas=(0.5, 0.999))
    stream, weights = Repeated(), []
    for step in (1, 2):
        fakes.after_step(step)
        draws = Randomness(stream)
        latents = draws.normal(SIZE * LATENT).view(SIZE, LATENT)
        labels = (draws.uniform(SIZE) * CLASSES).ceil().long() - 1
        logits = network(expected(latents, labels), labels)
        if step == 1:
            assert fakes.controller.accuracy == float((torch.sigmoid(logits) < 0.5).double().mean())
        optimizer.zero_grad()
        (-torch.log(torch.sigmoid(logits))).mean().backward(inputs=list(expected.parameters()))
        optimizer.step()
        weights.append([p.detach().clone() for p in expected.parameters()])
    assert all(p.grad is None for p in network.parameters())
    if decay:
        # the first one copies; the decay rises to its value, and is 3 / 12 at the second
        weights[1] = [torch.lerp(a, b, 0.75) for a, b in zip(*weights, strict=True)]
    for found, wanted in zip(fakes.trained().parameters(), weights[1], strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_mode_seeking_adds_the_inverse_ratio_of_distances_of_pairs() -> None:
    """A step of plain Adam on the loss as the paper has it, one pair of fakes of a class at a time."""
    settings = settings_with("private.ema_decay=0", "private.discriminator_steps=1", "private.mode_seeking=0.5")
    network, generator = networks(settings)
    _, expected = networks(settings)
    fakes = FakeSide(generator, network, settings.private, Randomness(Repeated()))
    fakes.after_step(1)
    draws = Randomness(Repeated())
    latents = draws.normal(SIZE * LATENT).view(SIZE, LATENT)
    labels = (draws.uniform(SIZE) * CLASSES).ceil().long() - 1
    others = draws.normal(SIZE * LATENT).view(SIZE, LATENT)
    losses = []
    for i in range(SIZE):
        one, other = (expected(z[i : i + 1], labels[i : i + 1]) for z in (latents, others))
        probability = torch.sigmoid(network(one, labels[i : i + 1]))
        between = sum(abs(a - b) for a, b in zip(one.flatten(), other.flatten(), strict=True)) / one.numel()
        of_latents = np.abs((latents[i] - others[i]).numpy()).mean()
        losses.append(-torch.log(probability).sum() + 0.5 / (between / of_latents + 1e-5))
    optimizer = torch.optim.Adam(expected.parameters(), lr=1e-3, betas=(0.5, 0.999))
    sum(losses).div(SIZE).backward(inputs=list(expected.parameters()))
    optimizer.step()
    for found, wanted in zip(generator.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-4, atol=1e-5)


def test_fakes_that_are_alike_are_driven_apart() -> None:
    """However alike they are, the loss is finite and smaller the further apart they are."""
    latents, others = torch.zeros(3, LATENT), torch.full((3, LATENT), 2.0)
    images = torch.zeros(3, 1, 8, 8)
    apart = images + torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1)
    found = closeness(images, apart, latents, others)
    torch.testing.assert_close(found, torch.tensor([1e5, 4.0, 2.0]), rtol=1e-4, atol=0)


def test_both_adams_have_the_betas_of_the_paper() -> None:
    settings = settings_with("private.learning_rate=0.25")
    (group,) = adam(networks(settings)[0], settings.private.learning_rate, settings.private).param_groups
    assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.999))


# n_D moves on every two generator steps, so these come after steps 1, 2, 4, 6, 11: 1, 1, 2, 2, 5
MOVING = (
    "private.discriminator_steps=null",
    "private.controller={floor: 1.0, decay: 0.0}",
    "private.ema_decay=0.5",
    "private.checkpoint_seconds=0",
)
UPDATES = [1, 2, 4, 6, 11]


def train(
    folder: Path, stream: Repeated, settings: DpGanSettings, seed: int, images: ImageSet | None = None
) -> GanGenerator:
    """Without noise and with all images in each batch, only the draws of fakes are random."""
    images = images or image_set()
    facts = PublicFacts.of(images)
    (spec,) = releases(settings, facts)
    budget = Budget(epsilon=1, delta=1e-3, dataset_size=SIZE, releases=(Release(spec=spec, noise_multiplier=0.0),))
    access = PrivateAccess(images, facts, budget, RunFolder(folder), device=CPU)
    access.draws = Randomness(stream)
    torch.manual_seed(seed)
    found = train_private(access, settings)["generator"]
    assert isinstance(found, GanGenerator)
    return found


@pytest.mark.parametrize("step", [3, 8, 11])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, step: int) -> None:
    """Killed in the middle of a step, or (11) before the generator's: all of its state comes back, the pace too."""
    settings = settings_with(*MOVING)
    stream = Repeated()
    whole = train(tmp_path / "whole", stream, settings, 0)
    assert stream.calls == 2 * 12 + 3 * len(UPDATES)
    # two calls for the fakes of each step, and three for those of each generator step, with mode seeking
    before = 2 * (step - 1) + 3 * sum(update < step for update in UPDATES)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", Repeated(0, before + (2 if step in UPDATES else 1)), settings, 0)
    saved = torch.load(tmp_path / "parts" / "checkpoints" / "discriminator.pt", weights_only=True)
    assert saved["step"] == step - 1
    # other random weights at first: they are replaced
    again = train(tmp_path / "parts", Repeated(before), settings, 1)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    ends = [
        torch.load(tmp_path / name / "checkpoints" / "discriminator.pt", weights_only=True)
        for name in ("whole", "parts")
    ]
    assert ends[0]["extra.controller"] == ends[1]["extra.controller"]
    assert ends[0]["extra.controller"]["rung"] == 2


def test_images_without_labels_make_an_unconditional_model(tmp_path: Path) -> None:
    images = replace(image_set(), labels=None, classes=())
    found = train(tmp_path, Repeated(), settings_with("private.steps=2"), 0, images)
    assert found.config["classes"] == 0
    assert found(torch.randn(2, LATENT), torch.zeros(2, dtype=torch.int64)).shape == (2, 1, 8, 8)


def test_bfloat16_gives_about_the_same_gradient() -> None:
    exact = one_gradient(settings_with())
    narrow = one_gradient(settings_with("private.precision=bfloat16"))
    assert 0 < float((narrow - exact).norm()) < 0.1 * float(exact.norm())


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("private.expected_batch=13", "private.expected_batch", "use at most its 12 images"),
        ("private.noise_band=2", "private.noise_band", "more than the 12 images"),
        ("private.multiplicity=2", "private.multiplicity", "has nothing to average"),
        ("private.trainable=[nothing]", "private.trainable", "no parameter matches"),
    ],
)
def test_settings_that_do_not_fit_are_refused(override: str, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        releases(settings_with(override), PublicFacts.of(image_set()))
    assert refused.value.field == field


@pytest.mark.parametrize("size", [4, 6, 12, 24, 48])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="size is halved"):
        settings_with(f"image.size={size}")


def test_losses_are_logistic() -> None:
    network = networks(settings_with())[0]
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(loss_of_real(network, images, labels), -F.logsigmoid(network(images, labels)))
