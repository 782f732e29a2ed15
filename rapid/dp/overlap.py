"""The check, before any training, that no private images are among the public ones.

Images in the public bundle are handed on as they are: a private image that is also public would have no protection,
whatever epsilon says. So the number of private images with a near-duplicate among the public ones is made known once,
with noise, and training is refused where that number cannot be noise alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.data.thumbnails import near_duplicates, thumbnails
from rapid.dp.accounting import Release, prv_epsilon
from rapid.dp.randomness import Randomness
from rapid.dp.ranks import Ranks
from rapid.errors import PrivacyRefused, RapidError
from rapid.files import write_json
from rapid.progress import Progress

REFUSED = 6
"""Standard deviations of the noise above which a count is refused; noise alone comes there once in a billion runs."""
FOUND = 9
"""Standard deviations from which on an overlap is refused in 999 of 1000 runs."""


def smallest_found(release: Release) -> int:
    """The least number of overlapping images that is almost surely refused."""
    return math.ceil(FOUND * release.noise_multiplier)


def noisy_count(found: int, release: Release, ranks: Ranks, randomness: Randomness | None = None) -> int:
    """The sum of the counts of all ranks with Gaussian noise, rounded; the same on all of them.

    Formal guarantee: one image adds or takes away at most 1, so this is the Gaussian mechanism with sensitivity 1 and
    standard deviation noise_multiplier. The noise comes from the first rank alone, and from the stream cipher; rounding
    to whole numbers hides the last digits of floating-point noise.

    Args:
        found: number of images of this rank that count; private.
        release: what is spent.
        ranks: the processes that share the work.
        randomness: of the noise, by default the stream cipher.

    Raises:
        LostRank: another rank is gone.
    """
    total = torch.tensor([found], dtype=torch.float64)
    if ranks.first:
        total += (randomness or Randomness()).normal(1).double() * release.noise_multiplier
    ranks.all_reduce(total)
    return round(total.item())


def check_overlap(
    images: NDArray[np.uint8],
    public: NDArray[np.uint8],
    release: Release,
    file: Path,
    ranks: Ranks,
    *,
    size: int,
    delta: float,
) -> None:
    """Refuse private images that overlap with the public ones; without a refusal nothing is said.

    Formal guarantee: all that leaves is the result of one `noisy_count`, which `file` holds before anything follows
    from it. Which images are alike, and how much, is neither shown nor kept.

    | case                       | what happens                                             |
    |----------------------------|----------------------------------------------------------|
    | checked by an earlier run  | its count decides again; the images are not looked at    |
    | stopped during the check   | nothing was made known, so a resumed run makes it anew   |
    | faint images               | they are like none, see `rapid.data.thumbnails`                   |

    Args:
        images: private images of this rank, uint8 (n, H, W) or (n, H, W, 3), in the form of the public ones.
        public: thumbnails of the public images, uint8 (M, 256).
        release: what is spent.
        file: where the first rank keeps the count, for resumed runs.
        ranks: the processes that share the work.
        size: number of private images on all ranks.
        delta: at which the refusal tells what was spent.

    Raises:
        PrivacyRefused: the sets overlap.
        RapidError: `file` is damaged.
        LostRank: another rank is gone.
    """
    count = ranks.broadcast(ranks.all_or_none(lambda: _recorded(file) if ranks.first else None))
    if count is None:
        with Progress("overlap check", len(images), "image", shown=ranks.first) as progress:
            found = near_duplicates(thumbnails(images), public, progress.advance)
        count = noisy_count(int(found.sum()), release, ranks)
    noisy = count

    def keep_and_decide() -> None:
        if not ranks.first:
            return
        if not file.is_file():
            write_json(file, {"noisy_count": noisy})
        if noisy > REFUSED * release.noise_multiplier:
            raise PrivacyRefused(_refusal(noisy, release, size, delta))

    ranks.all_or_none(keep_and_decide)


def _refusal(count: int, release: Release, size: int, delta: float) -> str:
    return (
        f"--private and --base overlap: about {count:,} of the {size:,} private images have a near-duplicate among the "
        f"public ones (a count with noise of standard deviation {release.noise_multiplier:.3g}; "
        f"{smallest_found(release):,} or more are found almost surely). Nothing was trained. This count has spent at "
        f"most epsilon {prv_epsilon([release], delta):.3g} at delta {delta:.2g}, which adds to what is done next with "
        "these images. Build a base of other public images, and give a new --out"
    )


def _recorded(file: Path) -> int | None:
    """The count of an earlier run, None without one."""
    if not file.is_file():
        return None
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["noisy_count"])
    except (ValueError, KeyError, TypeError) as error:
        raise RapidError(f"{file}: is damaged; give a new --out") from error
