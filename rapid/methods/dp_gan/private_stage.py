"""The private stage (Algorithm 1 of the paper): DP-SGD of the discriminator, and generator steps between its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rapid.bundle import Component
from rapid.data import to_unit_range
from rapid.data.units import ONE_PERSON
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.execution import Execution
from rapid.dp.objective import Objective
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.training_spec import training_spec
from rapid.errors import InputError
from rapid.methods.base import Description
from rapid.methods.dp_gan.fakes import FakeSide, adam, loss_of_real
from rapid.methods.dp_gan.generator import GENERATOR, DpGanSampler
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.nn.gan import GanDiscriminator, GanGenerator
from rapid.tones.fit import released_tones
from rapid.tones.release import tones_specs
from rapid.training import Trainer
from rapid.training.optimizers import select_trainable, trained_count

DISCRIMINATOR = "discriminator"
TYPICAL_STEPS = 10
"""n_D by which the time of adaptive steps is measured: a generator step every so often takes little."""


def releases(settings: DpGanSettings, facts: PublicFacts) -> Sequence[DpSgdSpec | QuerySpec]:
    """The training of the discriminator, charged by its steps, and tones. All of the generator's is post-processing.

    Args:
        settings: batch, steps, clip norm.
        facts: public facts of the private images.

    Raises:
        InputError: settings that do not fit the images.
    """
    own = settings.private
    if own.multiplicity > 1 and facts.unit != ONE_PERSON:
        problem = "has nothing to average: the loss of a real image has no draws; use 1"
        raise InputError("private.multiplicity", problem, own.multiplicity)
    if own.steps < (own.discriminator_steps or 1):
        problem = (
            f"are fewer than private.discriminator_steps = {own.discriminator_steps}: the generator would learn nothing"
        )
        raise InputError("private.steps", problem, own.steps)
    select_trainable(build_discriminator(settings, len(facts.classes)), own.trainable)
    return [
        training_spec(
            DISCRIMINATOR,
            "discriminator of a GAN, on real images; its generator learns from the discriminator alone",
            own,
            facts,
        ),
        *tones_specs(own.tones, facts.dataset_size),
    ]


def train_private(access: PrivateAccess, settings: DpGanSettings) -> Mapping[str, Component]:
    """Train the GAN; the components are its generator, and tones if they are wanted.

    Args:
        access: the private images.
        settings: of the run.

    Raises:
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    own, device, classes = settings.private, access.device, len(access.facts.classes)
    discriminator = build_discriminator(settings, classes).to(device)
    select_trainable(discriminator, own.trainable)
    generator = build_generator(settings, classes).to(device)
    fakes = FakeSide(generator, discriminator, own, access.draws, access.ranks)
    optimizer = adam(discriminator, own.learning_rate, own)

    labels = (
        access.labels
        if access.facts.classes
        else access.map(lambda images: torch.zeros(len(images), dtype=torch.int64), access.images)
    )
    access.train(
        DISCRIMINATOR,
        Trainer(discriminator, optimizer, LambdaLR(optimizer, lambda _: 1.0), extra=fakes.state),
        RealLosses(discriminator, device),
        [access.images, labels],
        execution=Execution.of(own),
        before_update=fakes.add_gradients,
        between_steps=fakes.after_step,
    )
    trained = fakes.trained().eval()
    return {GENERATOR: trained} | released_tones(
        access, lambda: DpGanSampler(trained, access.facts.classes, device, settings.generation)
    )


class RealLosses(Objective):
    """Losses of real images by the discriminator.

    Args:
        discriminator: that is trained.
        device: of the discriminator.
    """

    def __init__(self, discriminator: GanDiscriminator, device: torch.device) -> None:
        self._discriminator, self._device = discriminator, device

    def prepare(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images in [-1, 1] and labels on the device, of images, uint8 (n, H, W) or (n, H, W, 3), and labels."""
        images, labels = rows
        return to_unit_range(images.numpy(), self._device), labels.to(self._device)

    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses, float (n,)."""
        return loss_of_real(self._discriminator, *prepared)


def typical(settings: DpGanSettings) -> DpGanSettings:
    """With a fixed n_D; adaptive steps begin with n_D = 1, which takes longer than what follows."""
    fixed = settings.private.discriminator_steps or TYPICAL_STEPS
    return settings.model_copy(update={"private": settings.private.model_copy(update={"discriminator_steps": fixed})})


def describe_private(settings: DpGanSettings) -> Description:
    """Describe a private bundle."""
    own = settings.private
    frequency = own.discriminator_steps or "adaptive"
    about = (
        "A class-conditional GAN. Its discriminator was trained privately on real images and on fakes; the generator\n"
        "has learned from the discriminator alone. Nothing else was used: there are no public images.\n"
    )
    return Description(about, {"discriminator_steps": frequency, "latent": settings.generator.latent})


def trained_parameters(settings: DpGanSettings, classes: int) -> int:
    """Number of parameters of the discriminator that would be trained."""
    return trained_count(lambda: build_discriminator(settings, classes), settings.private.trainable)


def build_discriminator(settings: DpGanSettings, classes: int) -> GanDiscriminator:
    """A new discriminator with random weights; 0 classes: unconditional."""
    return GanDiscriminator(_shape(settings, classes) | settings.discriminator.model_dump(mode="json"))


def build_generator(settings: DpGanSettings, classes: int) -> GanGenerator:
    """A new generator with random weights; 0 classes: unconditional."""
    return GanGenerator(_shape(settings, classes) | settings.generator.model_dump(mode="json"))


def _shape(settings: DpGanSettings, classes: int) -> dict[str, int]:
    return {"size": settings.image.size, "image_channels": settings.image.channels, "classes": classes}
