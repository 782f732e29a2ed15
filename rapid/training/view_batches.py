"""Random batches of views of public images, on which a diffusion model is trained."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import ViewSettings
from rapid.data import to_unit_range
from rapid.data.subset import Images
from rapid.data.views import DRAWS, random_views
from rapid.ranks import Ranks


class ViewBatch(NamedTuple):
    """The rows of a batch that are this rank's, on the device.

    Attributes:
        views: float (n, C, H, W) in [-1, 1].
        labels: int64 (n,); the null class where the label is dropped.
        uniform: of the noise levels, uniform on [0, 1), float64 (n,); on the CPU.
        noise: standard normal, float (n, ...).
    """

    views: Tensor
    labels: Tensor
    uniform: Tensor
    noise: Tensor


class ViewBatches:
    """Views of public images, with their classes and the draws of a diffusion model's loss.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3).
        labels: int64 (N,), all `null_class` without classes.
        null_class: stands for any class.
        views: their ranges.
        noise_shape: of the noise of an image.
        label_dropout: probability of the null class.
        device: where the batches go.
        ranks: the processes that share each batch: each draws all of it and computes its own rows.
    """

    def __init__(
        self,
        images: Images,
        labels: NDArray[np.int64],
        null_class: int,
        views: ViewSettings,
        noise_shape: tuple[int, ...],
        *,
        label_dropout: float,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._images, self._labels, self._null_class = images, labels, null_class
        self._views, self._noise_shape, self._label_dropout = views, noise_shape, label_dropout
        self._device, self._ranks = device, ranks

    def draw(self, count: int, generator: torch.Generator) -> ViewBatch:
        """The next batch, of `count` examples in all ranks; they are drawn with replacement."""
        # drawn on the CPU, so that a step draws the same numbers on any device
        rows = torch.randint(len(self._images), (count,), generator=generator)
        draws = torch.rand(count, DRAWS, generator=generator)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        nulls = torch.rand(count, generator=generator) < self._label_dropout
        noise = torch.randn(count, *self._noise_shape, generator=generator)
        own = self._ranks.rows
        chosen, device = rows[own].numpy(), self._device
        labels = torch.where(nulls[own], self._null_class, torch.from_numpy(self._labels[chosen]))
        views = random_views(to_unit_range(self._images[chosen], device), draws[own].to(device), self._views)
        return ViewBatch(views, labels.to(device), uniform[own], noise[own].to(device))
