"""What the public networks are shown: the public images as they are, or random views, the sets in equal parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import AugmentSettings
from rapid.data import to_unit_range
from rapid.data.augment import augment


class AugmentedImages:
    """A number of views of public images.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3).
        sources: the set that each image came from, int64 (N,).
        count: number of views; 0 takes each image once, as it is.
        settings: ranges of the random views; not used if `count` is 0.
        device: where the views are made.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        sources: NDArray[np.int64],
        count: int,
        settings: AugmentSettings,
        device: torch.device,
    ) -> None:
        self._images = images
        self._augment = settings if count else None
        self._device = device
        self.rows = even_rows(sources, count) if count else np.arange(len(images))
        """The image that each view shows, int64 (count,)."""

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Random views, float (count, C, H, W) in [-1, 1]; `generator` is on the CPU."""
        chosen = torch.randint(len(self), (count,), generator=generator)
        return self._view(self.rows[chosen.numpy()], generator)

    def batches(self, size: int) -> Iterator[Tensor]:
        """All views in the order of `rows`, each time the same ones, float (<= size, C, H, W) in [-1, 1]."""
        for start in range(0, len(self), size):
            yield self._view(self.rows[start : start + size], torch.Generator().manual_seed(start))

    def _view(self, rows: NDArray[np.int64], generator: torch.Generator) -> Tensor:
        images = to_unit_range(self._images[rows], self._device)
        return images if self._augment is None else augment(images, self._augment, generator)


def even_rows(sources: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Which images to show: every set equally often, and every image of a set; equal to within one. Shuffled.

    Args:
        sources: the set that each image came from, int64 (N,), N >= 1.
        count: how many to choose.

    Returns:
        Indices into `sources`, int64 (count,).
    """
    rng = np.random.default_rng(0)
    kinds = np.unique(sources)
    shares = [count // len(kinds) + (number < count % len(kinds)) for number in range(len(kinds))]
    parts = [
        np.resize(rng.permutation(np.flatnonzero(sources == kind)), share)
        for kind, share in zip(kinds, shares, strict=True)
    ]
    return rng.permutation(np.concatenate(parts))
