"""The loss of the private stage: that of a denoiser at random noise levels (DPDM, Algorithm 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rapid.data import to_unit_range
from rapid.dp.objective import Objective
from rapid.dp.randomness import Randomness
from rapid.nn.preconditioned import PreconditionedDenoiser, denoising_losses


class Draws(NamedTuple):
    """Random draws for n rows, made before any of them is read."""

    sigma: Tensor
    """Noise levels, float (n,)."""
    noise: Tensor
    """Standard normal, float (n, C, H, W)."""
    dropped: Tensor
    """Where the label becomes the null class, bool (n,)."""


class DenoisingObjective(Objective):
    """Losses of private images, each from its own pixels and label.

    Noise multiplicity needs nothing here: of K rows of an image each has its own draws.

    Args:
        denoiser: the network that is trained.
        label_dropout: share of rows with the null class.
        randomness: of levels, noise and label dropout, which must be secret.
        level_scale: factor of the noise levels of the configuration.
    """

    def __init__(
        self,
        denoiser: PreconditionedDenoiser,
        label_dropout: float,
        randomness: Randomness,
        level_scale: float = 1.0,
    ) -> None:
        self.denoiser = denoiser
        self._label_dropout = label_dropout
        self._level_scale = level_scale
        self._randomness = randomness
        self._device = next(denoiser.parameters()).device

    def levels(self, uniform: Tensor) -> Tensor:
        """Noise levels of training, float (n,): their quantiles at float64 (n,) in (0, 1]."""
        return (self._level_scale * self.denoiser.preconditioning.level(uniform)).float()

    def draw(self, shape: tuple[int, ...]) -> Draws:
        """Draw for images of this shape, (n, C, H, W)."""
        count, source = shape[0], self._randomness
        sigma = self.levels(source.uniform(count))
        noise = source.normal(math.prod(shape)).view(shape)
        dropped = source.uniform(count) <= self._label_dropout
        return Draws(*(drawn.to(self._device) for drawn in (sigma, noise, dropped)))

    def losses(self, x0: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """Losses for given draws, float (n,).

        Args:
            x0: images in [-1, 1], float (n, C, H, W).
            labels: int64 (n,), the null class if the images are unlabelled.
            draws: of the n rows.
        """
        return self.compute(x0, labels, *draws)

    def prepare(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """With fresh draws, what `compute` takes.

        Args:
            rows: images, uint8 (n, H, W) or (n, H, W, 3), and, if they are labelled, labels, int64 (n,), on the CPU.
        """
        images, *labels = rows
        x0 = to_unit_range(images.numpy(), self._device)
        y = labels[0].to(self._device) if labels else self.denoiser.null_labels(len(x0))
        return x0, y, *self.draw(tuple(x0.shape))

    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses, float (n,), of images, labels and draws."""
        x0, labels, sigma, noise, dropped = prepared
        y = torch.where(dropped, self.denoiser.num_classes, labels)
        return denoising_losses(self.denoiser, x0, y, sigma, noise)
