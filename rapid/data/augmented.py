"""The images that the public networks train on: the public images themselves, or random augmentations of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import AugmentSettings
from rapid.data.augment import drawn, transformed
from rapid.data.fit import to_unit_range
from rapid.data.subset import Images
from rapid.mapped import release

ALL = slice(None)


class AugmentedImages:
    """A fixed number of augmented public images; every public set contributes the same number.

    Args:
        images: N of them, uint8 (H, W) or (H, W, 3).
        sources: the set that each image came from, int64 (N,).
        count: number of augmented images; 0 keeps each image once, unchanged.
        settings: ranges of the augmentation; ignored if `count` is 0.
        device: where the augmented images are computed.
    """

    def __init__(
        self,
        images: Images,
        sources: NDArray[np.int64],
        count: int,
        settings: AugmentSettings,
        device: torch.device,
    ) -> None:
        self._images = images
        self._augment = settings if count else None
        self._device = device
        self.rows = even_rows(sources, count) if count else np.arange(len(images))
        """Index of the original of each augmented image, int64 (count,)."""

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int, generator: torch.Generator, part: slice = ALL) -> Tensor:
        """Newly augmented images, float (count, C, H, W) in [-1, 1].

        Args:
            count: how many are drawn.
            generator: on the CPU.
            part: which of them are returned; the others are drawn, but not computed.
        """
        chosen = torch.randint(len(self), (count,), generator=generator)
        return self._make(self.rows[chosen.numpy()], generator, part)

    def batch(self, start: int, size: int) -> Tensor:
        """The augmented images of `rows[start : start + size]`, float (<= size, C, H, W); equal on every call."""
        images = self._make(self.rows[start : start + size], torch.Generator().manual_seed(start))
        release()
        return images

    def batches(self, size: int) -> Iterator[Tensor]:
        """All augmented images in the order of `rows`, float (<= size, C, H, W) in [-1, 1]; equal on every call."""
        for start in range(0, len(self), size):
            yield self.batch(start, size)

    def _make(self, rows: NDArray[np.int64], generator: torch.Generator, part: slice = ALL) -> Tensor:
        images = to_unit_range(self._images[rows[part]], self._device)
        if self._augment is None:
            return images
        return transformed(images, self._augment, drawn(len(rows), generator)[:, part].to(self._device))


def even_rows(sources: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Choose originals evenly: each set equally often, and each image of a set equally often, to within one.

    Args:
        sources: the set that each image came from, int64 (N,), N >= 1.
        count: how many to choose.

    Returns:
        Indices into `sources`, int64 (count,), shuffled.
    """
    rng = np.random.default_rng(0)
    sets = np.unique(sources)
    shares = [count // len(sets) + (number < count % len(sets)) for number in range(len(sets))]
    parts = [
        np.resize(rng.permutation(np.flatnonzero(sources == chosen)), share)
        for chosen, share in zip(sets, shares, strict=True)
    ]
    return rng.permutation(np.concatenate(parts))
