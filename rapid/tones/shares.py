"""Shares of pixels by bins of brightness, and how noise is taken out of them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rapid.tones.curve import LEVELS

INNER = 32
"""Bins of the levels 1 to 254; black and white have bins of their own, because many images have much of both."""
MOST_EXTREMES = 0.5
"""Share of black and white pixels from which on private images count as drawings in black and white."""

Shares = NDArray[np.float64]


def bins_of_levels() -> NDArray[np.int64]:
    """The bin of each level, int64 (LEVELS,), not decreasing."""
    levels = np.arange(LEVELS)
    inner = 1 + (levels - 1) * INNER // (LEVELS - 2)
    return np.where(levels == 0, 0, np.where(levels == LEVELS - 1, INNER + 1, inner))


def shares_of_bins(counts: NDArray[np.int64]) -> Shares:
    """Shares of the bins, float64 (INNER + 2,), of pixels of each level, int64 (LEVELS,), not all 0."""
    shares: Shares = np.bincount(bins_of_levels(), counts) / counts.sum()
    return shares


def likely_shares(found: Shares, own: Shares, noise: float) -> Shares:
    """Shares that were found with noise, drawn towards those that images have by themselves; a distribution.

    Pixels are divided between black and the rest, inner levels and white, and the halves of the inner levels down to
    single bins: in the proportions of `own`, corrected by as much of the difference as noise does not explain (the
    nonnegative garrote, Breiman 1995). So a difference counts at the widest scale at which it can be seen, and bins of
    which noise tells nothing stay as they are. Drawings in black and white have next to nothing between these, so there
    the nearest distribution is nearer. Whether private images are drawings is seen in `found`: a decoder may draw
    levels near to black and white.

    Args:
        found: with noise, float64 (INNER + 2,).
        own: a distribution, of the same shape.
        noise: standard deviation of the noise in each share.
    """
    if found[0] + found[-1] > MOST_EXTREMES:
        return nearest_distribution(found)
    return _divided(found, own, noise, 1.0)


def _divided(found: Shares, own: Shares, noise: float, mass: float) -> Shares:
    count = len(found)
    if count == 1:
        return np.array([mass])
    cut = {INNER + 2: 1, INNER + 1: INNER}.get(count, count // 2)
    whole = own.sum()
    usual = own[:cut].sum() / whole if whole > 0 else cut / count
    more = found[:cut].sum() - usual * found.sum()
    deviation = noise * math.sqrt(cut * (1 - usual) ** 2 + (count - cut) * usual**2)
    kept = more * max(0.0, 1 - (deviation / more) ** 2) if more else 0.0
    first = min(max(usual * mass + kept, 0.0), mass)
    parts = (found[:cut], own[:cut], first), (found[cut:], own[cut:], mass - first)
    return np.concatenate([_divided(some, usually, noise, amount) for some, usually, amount in parts])


def nearest_distribution(row: Shares) -> Shares:
    """The nearest point of the probability simplex, (n,): it takes the noise out of empty bins.

    The method is that of Held, Wolfe and Crowder (1974).
    """
    descending = np.sort(row)[::-1]
    excess = (descending.cumsum() - 1) / np.arange(1, len(row) + 1)
    found: Shares = np.maximum(row - excess[np.flatnonzero(descending > excess)[-1]], 0)
    return found
