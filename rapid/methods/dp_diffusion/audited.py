"""What an audit trains: a denoiser of random weights with the losses of the private stage, on random images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rapid.dp.audit import Subject
from rapid.dp.randomness import Randomness
from rapid.methods.dp_diffusion.networks import build_denoiser
from rapid.methods.dp_diffusion.objective import Draws, PrivateObjective
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.training.optimizers import select_trainable

CLASSES, CANARIES = 10, 16


def subjects(settings: DpDiffusionSettings) -> Sequence[Subject]:
    """The denoiser in float32 and in bfloat16; each canary has an image, a label and draws of its own.

    Raises:
        InputError: `private.trainable` matches no parameter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        denoiser = build_denoiser(settings, CLASSES).eval()
    select_trainable(denoiser, settings.private.trainable)
    objective = PrivateObjective(settings, denoiser, Randomness())
    draws = objective.draw(CANARIES)
    size, colours = settings.image.size, (3,) if settings.image.channels == 3 else ()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (CANARIES, size, size, *colours), dtype=torch.uint8, generator=generator)
    labels = torch.arange(CANARIES) % CLASSES

    def losses(indices: Tensor) -> Tensor:
        return objective.losses(images[indices], labels[indices], Draws(*(part[indices] for part in draws)))

    own = settings.private
    found = Subject(
        "pixel diffusion",
        denoiser,
        losses,
        CANARIES,
        own.clip_norm,
        own.multiplicity,
        physical_batch=own.draws_at_a_time,
    )
    return [found, found.with_autocast()]
