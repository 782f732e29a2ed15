"""The release of tones: the mean histogram of the pixels of private images, by channel.

Formal guarantee: one `mean` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rapid.config.sections import TonesSettings
from rapid.data.units import plural
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.releases import QuerySpec
from rapid.rounding import as_typed
from rapid.tones.curve import NAME
from rapid.tones.shares import INNER, Shares, bins_of_levels

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
    return math.sqrt(channels_of(image_shape)) * noise_multiplier / dataset_size > LARGEST_NOISE


def channels_of(image_shape: Sequence[int]) -> int:
    """Channels of images of (H, W) or (H, W, 3)."""
    return image_shape[2] if len(image_shape) == 3 else 1


def warn_if_hidden(budget: Budget, facts: PublicFacts) -> None:
    """Warn, before anything is spent, of a release of tones that would be of no use."""
    for release in budget.releases:
        if release.name == NAME and is_hidden(release.noise_multiplier, facts.dataset_size, facts.image_shape):
            warnings.warn(
                f"private.tones.share={release.spec.share} would be spent for nothing: at epsilon "
                f"{as_typed(budget.epsilon)} noise hides the tones of {facts.dataset_size:,} {plural(facts.unit)}; "
                "set it to 0, or make it larger",
                stacklevel=4,
            )


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


class Tones(NamedTuple):
    """Noisy shares of the bins among pixels.

    Attributes:
        shares: by channel, float64 (channels, INNER + 2).
        noise: standard deviation in each.
    """

    shares: Shares
    noise: float


def release_tones(access: PrivateAccess) -> Tones | None:
    """Release the shares of the bins among the pixels of private images.

    Args:
        access: its budget lists the release of `tones_specs`.

    Returns:
        None if noise hides them.
    """
    channels = channels_of(access.facts.image_shape)
    shares = math.sqrt(channels) * access.mean(NAME, image_row, access.images).numpy().reshape(channels, INNER + 2)
    multiplier = access.budget.release(NAME).noise_multiplier
    if is_hidden(multiplier, access.facts.dataset_size, access.facts.image_shape):
        return None
    return Tones(shares, math.sqrt(channels) * multiplier / access.facts.dataset_size)
