"""The release of tones: the mean histogram of the pixels of private images, by channel.

Formal guarantee: one `mean` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import TonesSettings
from rapid.data.units import plural
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.releases import QuerySpec
from rapid.tones.curve import LEVELS, NAME

INNER = 32
"""Bins of the levels 1 to 254; black and white have bins of their own, because many images have much of both."""
LARGEST_NOISE = 0.02
"""Standard deviation of the noise in a share of the pixels, above which images are left as they are."""


def tones_specs(settings: TonesSettings, dataset_size: int) -> list[QuerySpec]:
    """The release of the tones, if it has a share."""
    if settings.share == 0:
        return []
    title = "mean histogram of the brightness of pixels, by channel"
    return [
        QuerySpec(name=NAME, kind="mean", title=title, share=settings.share, sensitivity=1.0, dataset_size=dataset_size)
    ]


def is_hidden(noise_multiplier: float, dataset_size: int, image_shape: Sequence[int]) -> bool:
    """Whether the noise hides the tones, so that images are left as they are; by public numbers alone.

    Args:
        noise_multiplier: of the release.
        dataset_size: N.
        image_shape: (H, W) or (H, W, 3).
    """
    channels = image_shape[2] if len(image_shape) == 3 else 1
    return math.sqrt(channels) * noise_multiplier / dataset_size > LARGEST_NOISE


def warn_if_hidden(budget: Budget, facts: PublicFacts) -> None:
    """Warn, before anything is spent, of a release of tones that would be of no use."""
    for release in budget.releases:
        if release.name == NAME and is_hidden(release.noise_multiplier, facts.dataset_size, facts.image_shape):
            warnings.warn(
                f"private.tones.share={release.spec.share} would be spent for nothing: at epsilon {budget.epsilon:.3g} "
                f"noise hides the tones of {facts.dataset_size:,} {plural(facts.unit)}; set it to 0, or make it larger",
                stacklevel=4,
            )


def bins_of_levels() -> NDArray[np.int64]:
    """The bin of each level, int64 (LEVELS,), not decreasing."""
    levels = np.arange(LEVELS)
    inner = 1 + (levels - 1) * INNER // (LEVELS - 2)
    return np.where(levels == 0, 0, np.where(levels == LEVELS - 1, INNER + 1, inner))


def image_row(images: Tensor) -> Tensor:
    """Shares of the bins, by channel, float32 (n, C * (INNER + 2)) of l2 norm 1 at most.

    Args:
        images: uint8 (n, H, W) or (n, H, W, 3).
    """
    count, size, channels = len(images), images.shape[1] * images.shape[2], images.shape[3] if images.ndim == 4 else 1
    pixels = images.reshape(count, size, channels)
    bins = INNER + 2
    found = torch.from_numpy(bins_of_levels())[pixels.cpu().long()]
    # a histogram of its own for each image and channel
    first = torch.arange(count * channels).view(count, 1, channels) * bins
    counts = torch.bincount((found + first).flatten(), minlength=count * channels * bins)
    rows: Tensor = counts.view(count, channels * bins).float() / (size * math.sqrt(channels))
    return rows


def release_tones(access: PrivateAccess, channels: int) -> NDArray[np.float64] | None:
    """The shares of the bins among the pixels of private images, float64 (channels, INNER + 2); each row sums to 1.

    Args:
        access: its budget lists the release of `tones_specs`.
        channels: of the images.

    Returns:
        None if noise hides them.
    """
    shares = math.sqrt(channels) * access.mean(NAME, image_row, access.images).numpy().reshape(channels, INNER + 2)
    if is_hidden(access.budget.release(NAME).noise_multiplier, access.facts.dataset_size, access.facts.image_shape):
        return None
    return np.stack([nearest_distribution(row) for row in shares])


def nearest_distribution(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point of the probability simplex, (n,): it takes the noise out of empty bins.

    The method is that of Held, Wolfe and Crowder (1974).
    """
    descending = np.sort(row)[::-1]
    excess = (descending.cumsum() - 1) / np.arange(1, len(row) + 1)
    found: NDArray[np.float64] = np.maximum(row - excess[np.flatnonzero(descending > excess)[-1]], 0)
    return found
