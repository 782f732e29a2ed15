"""The check, before any training, that no private images are among the public ones.

Images in the public bundle are passed on unprotected: a private image that is also public would have no protection,
whatever epsilon is. So the number of private images with a near-duplicate among the public ones is released once, with
noise, and training is refused if noise alone cannot explain that number.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.data.thumbnails import LIKENESS, SIDE, NearDuplicates, thumbnails
from rapid.data.units import ONE_IMAGE, ONE_PERSON, plural
from rapid.dp.access import PrivateAccess
from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget
from rapid.dp.releases import QuerySpec, Release
from rapid.errors import PrivacyRefused
from rapid.rounding import rounded_down, rounded_up

NAME = "overlap"
FINEST = 1e-4
"""Least noise of the check, as a share of the private images: some resemble public ones by chance."""
REFUSED = 6
"""Standard deviations of the noise above which a count is refused; noise alone exceeds it once in a billion runs."""
FOUND = 9
"""An overlap of at least this many standard deviations is refused in all but 2 of 1000 runs."""


def overlap_spec(dataset_size: int, share: float, unit: str = ONE_IMAGE) -> QuerySpec:
    """The release of the check, which alone would spend `share` of epsilon or less."""
    who = "people with an image that has" if unit == ONE_PERSON else "private images with"
    return QuerySpec(
        name=NAME,
        kind="count",
        title=f"number of {who} a near-duplicate among the public ones "
        f"(correlation of {SIDE}x{SIDE} grey thumbnails of {LIKENESS} or more)",
        share=share,
        dataset_size=dataset_size,
        least_noise_multiplier=max(1.0, FINEST * dataset_size),
    )


def smallest_found(release: Release) -> int:
    """The least number of overlapping images that is almost surely refused."""
    return math.ceil(FOUND * release.noise_multiplier)


def check_overlap(access: PrivateAccess, public: NDArray[np.uint8]) -> None:
    """Refuse private images that overlap with the public ones; otherwise report nothing.

    Formal guarantee: only the result of one count is released. Which images are similar, and how much, is neither shown
    nor stored. Faint images match none, see `rapid.data.thumbnails`.

    Args:
        access: its budget lists the release of `overlap_spec`; its images have the form of the public ones.
        public: thumbnails of the public images, uint8 (M, 256).

    Raises:
        PrivacyRefused: the sets overlap.
        LostRank: another rank is gone.
    """
    release = access.budget.release(NAME)
    least, size, unit = smallest_found(release), access.facts.dataset_size, access.facts.unit
    if least > size and access.ranks.first:
        warnings.warn(
            f"at this epsilon the overlap check would need {least:,} {plural(unit)} to be sure to find that public and "
            f"private images overlap, and --private has {size:,}: make sure of it yourself",
            stacklevel=2,
        )

    duplicates = NearDuplicates(public)

    def alike(images: Tensor) -> Tensor:
        return torch.from_numpy(duplicates.among(thumbnails(images.numpy())))

    count = access.count(NAME, alike, access.images)
    if count > REFUSED * release.noise_multiplier:
        refused = PrivacyRefused(_refusal(count, release, size, access.budget.delta, unit))
        refused.reported = not access.ranks.first
        raise refused


def _refusal(count: int, release: Release, size: int, delta: float, unit: str) -> str:
    who = "people have an image with" if unit == ONE_PERSON else "private images have"
    return (
        f"--private and --base overlap: about {min(count, size):,} of the {size:,} {who} a near-duplicate among the "
        f"public images (a count with noise of standard deviation {rounded_down(release.noise_multiplier)}; "
        f"{smallest_found(release):,} or more are found almost surely). Nothing was trained. This count has spent at "
        f"most epsilon {rounded_up(prv_epsilon([release.event()], delta))} at delta {rounded_up(delta)}, which adds to "
        "what is done next with these images. Build a base of other public images, and give a new --out"
    )


def overlap_note(budget: Budget) -> str:
    """Result of the check as a sentence for the privacy statement."""
    if NAME not in budget.names:
        return "It was not checked whether private images are among the public ones, which have no protection."
    least, people = smallest_found(budget.release(NAME)), budget.unit == ONE_PERSON
    if least > budget.dataset_size:
        return (
            "Whether private images are among the public ones, which have no protection, is not known: a noisy count, "
            "part of epsilon, gave no sign of it, but the "
            f"{'people' if people else 'private images'} are too few for it to be sure."
        )
    copies = f"images of {least:,} people" if people else f"{least:,} of them"
    return (
        "A noisy count, part of epsilon, gave no sign that private images are among the public ones, which have no "
        f"protection; copies of {copies} or more would almost surely have been seen, but none that are moved, "
        "turned or cropped."
    )
