"""Training of the denoiser on latents that have released moments, before DP-SGD: post-processing."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rapid.diffusion import Schedule
from rapid.diffusion.losses import denoising_loss
from rapid.methods.rapid.objectives import trained_timesteps
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.public import train


class Latents(Protocol):
    """What makes latents of classes: `ClassMoments` or `MovedLatents`."""

    def draw(self, labels: Tensor | None, count: int, generator: torch.Generator) -> Tensor:
        """Latents, float (count, c, h, w), of classes, int64 (count,), or without classes."""
        ...


def warm_up(denoiser: Denoiser, latents: Latents, settings: RapidSettings, checkpoint: Checkpoint) -> None:
    """Train the denoiser in place by the plain loss on such latents, all classes equally often.

    Their detail is not that of private images, so only timesteps from `warmup_from` on are trained, where noise hides
    it.

    Args:
        denoiser: of the private classes.
        latents: of the private classes; on the denoiser's device.
        settings: of the run.
        checkpoint: of the training state.
    """
    own, device = settings.private.moments, next(denoiser.parameters()).device
    schedule = Schedule.build(settings.schedule).to(device)
    highest = trained_timesteps(settings)
    lowest = min(own.warmup_from, highest)
    labelled = denoiser.num_classes > 0

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        count = own.warmup.batch_size
        eps = torch.randn(count, *settings.latent_shape, generator=generator).to(device)
        t = torch.randint(lowest, highest + 1, (count,), generator=generator).to(device)
        labels = torch.randint(max(1, denoiser.num_classes), (count,), generator=generator).to(device)
        x = latents.draw(labels if labelled else None, count, generator)
        dropped = torch.rand(count, generator=generator).to(device) < settings.private.label_dropout
        y = torch.where(dropped, denoiser.num_classes, labels) if labelled else denoiser.null_labels(count)
        return x, y, t, eps

    def value(x: Tensor, y: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        return denoising_loss(denoiser, schedule, x, y, t, eps).mean()

    train("warm-up", denoiser, Loss(draw, value), own.warmup, checkpoint)
