"""The release of tones: the mean histogram of the pixels of private images, by channel.

Formal guarantee: one `mean` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import TonesSettings
from rapid.dp.access import PrivateAccess
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
        None if there is too much noise.
    """
    shares = access.mean(NAME, image_row, access.images).numpy().reshape(channels, INNER + 2)
    noise = access.budget.release(NAME).noise_stddev / access.facts.dataset_size
    scale = math.sqrt(channels)
    return None if scale * noise > LARGEST_NOISE else np.stack([nearest_distribution(row) for row in scale * shares])


def nearest_distribution(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point of the probability simplex, (n,): it takes the noise out of empty bins.

    The method is that of Held, Wolfe and Crowder (1974).
    """
    descending = np.sort(row)[::-1]
    excess = (descending.cumsum() - 1) / np.arange(1, len(row) + 1)
    found: NDArray[np.float64] = np.maximum(row - excess[np.flatnonzero(descending > excess)[-1]], 0)
    return found
