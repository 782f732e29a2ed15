"""What an audit trains: the discriminator with its loss of real images. No private images are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rapid.dp.audit import Subject
from rapid.methods.dp_gan.fakes import loss_of_real
from rapid.methods.dp_gan.private_stage import build_discriminator
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.training.optimizers import select_trainable

CLASSES, CANARIES = 10, 16


def subjects(settings: DpGanSettings) -> Sequence[Subject]:
    """The discriminator in float32 and in bfloat16, with random weights, on canaries of uniform noise.

    Fakes are no part of it: the mechanism does not see them.

    Args:
        settings: shape of the network, clip norm.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        discriminator = build_discriminator(settings, CLASSES).eval()
    select_trainable(discriminator, settings.private.trainable)
    shape = (CANARIES, settings.image.channels, settings.image.size, settings.image.size)
    images = torch.rand(shape, generator=generator) * 2 - 1
    labels = torch.arange(CANARIES) % CLASSES

    def losses(indices: Tensor) -> Tensor:
        return loss_of_real(discriminator, images[indices], labels[indices])

    own = settings.private
    subject = Subject(
        "discriminator", discriminator, losses, CANARIES, own.clip_norm, physical_batch=own.draws_at_a_time
    )
    return [subject, subject.with_autocast()]
