"""Per-example losses of the private stage (Algorithm 1): views, timesteps and noise, each drawn for every row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rapid.data import to_unit_range
from rapid.data.views import DRAWS, random_views
from rapid.diffusion.losses import noise_prediction_loss
from rapid.diffusion.timesteps import TimestepMixture
from rapid.dp.objective import Objective
from rapid.dp.randomness import Randomness
from rapid.methods.dp_diffusion.networks import build_schedule, to_patches
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser


class Draws(NamedTuple):
    """Random draws for n rows, made before any image is read."""

    views: Tensor
    """Uniform numbers of the view, float64 (n, DRAWS)."""
    t: Tensor
    """Timesteps, int64 (n,)."""
    eps: Tensor
    """Noise, float (n, c, h, w)."""
    dropped: Tensor
    """Rows that are trained with the null class, bool (n,)."""


class PrivateObjective(Objective):
    """The noise-prediction loss of a random view of an image, at a timestep of the mixture.

    With multiplicity K an image has K rows, each with a view, a timestep and noise of its own; the mean of their
    gradients is what is clipped.

    Args:
        settings: schedule, mixture and views.
        denoiser: the network that is trained.
        randomness: of all draws. Privacy depends on it, too: another image changes which draws the others get.
    """

    def __init__(self, settings: DpDiffusionSettings, denoiser: Denoiser, randomness: Randomness) -> None:
        self.settings = settings
        self.denoiser = denoiser
        self.randomness = randomness
        self._device = denoiser.class_table.weight.device
        self.schedule = build_schedule(settings.schedule).to(self._device)
        own = settings.private.timesteps
        self.mixture = TimestepMixture(own.weights, own.breaks)

    def draw(self, count: int) -> Draws:
        """Draw for `count` rows."""
        shape = (count, *self.settings.latent_shape)
        views = self.randomness.uniform(count * DRAWS).view(count, DRAWS)
        t = self.mixture.quantile(self.randomness.uniform(count))
        eps = self.randomness.normal(math.prod(shape)).view(shape)
        dropped = self.randomness.uniform(count) <= self.settings.private.label_dropout
        return Draws(views.to(self._device), t.to(self._device), eps.to(self._device), dropped.to(self._device))

    def losses(self, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """Losses of rows, float (n,), for given draws; arguments as for `prepared`."""
        return self.compute(*self.prepared(images, labels, draws))

    def prepare(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """With fresh draws, what `compute` takes, of images and labels; see `prepared`."""
        images, labels = rows
        return self.prepared(images, labels, self.draw(len(images)))

    def prepared(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views in patches, labels, timesteps and noise.

        Args:
            images: uint8 (n, H, W) or (n, H, W, 3), on the CPU.
            labels: int64 (n,), the null class if the images are unlabelled.
            draws: of the n rows.
        """
        views = random_views(to_unit_range(images.numpy(), self._device), draws.views, self.settings.private.views)
        y = torch.where(draws.dropped, self.denoiser.num_classes, labels)
        return to_patches(views, self.settings.denoiser.patch), y, draws.t, draws.eps

    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses of rows, float (n,)."""
        x, labels, t, eps = prepared
        return noise_prediction_loss(self.denoiser, self.schedule, x, labels, t, eps)
