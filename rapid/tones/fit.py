"""The curve that gives generated images the released tones: histogram matching, nowhere steep."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Component
from rapid.dp.access import PrivateAccess
from rapid.sampling.generate import generate
from rapid.sampling.generator import Sampler
from rapid.stopping import check_stop
from rapid.tones.curve import LEVELS, NAME, ToneCurve
from rapid.tones.release import Tones, channels_of, release_tones
from rapid.tones.shares import INNER, bins_of_levels, likely_shares, shares_of_bins

STEEPEST = 4
"""Levels by which the curve may rise from one level to the next: it must not magnify rounding, nor noise in a bin."""
DRAWN, SEED = 512, 0
"""Images that are compared with the release."""


def released_tones(access: PrivateAccess, sampler: Callable[[], Sampler]) -> dict[str, Component]:
    """The curve as a component, by name; nothing if the budget does not list the release.

    Args:
        access: the private images.
        sampler: opens the trained model without a curve, on the first rank alone, which writes components.

    Raises:
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    if NAME not in access.budget.names:
        return {}
    tones = release_tones(access)
    return {NAME: tone_curve(access, sampler if access.ranks.first else None, tones)}


def tone_curve(
    access: PrivateAccess,
    sampler: Callable[[], Sampler] | None,
    tones: Tones | None,
    frequencies: NDArray[np.float64] | None = None,
) -> ToneCurve:
    """The curve that gives images as a model draws them the released tones; of no effect without sampler or tones.

    Args:
        access: for public facts and the device.
        sampler: opens the model without a curve.
        tones: as released; None if noise hides them.
        frequencies: see `fit_tones`.

    Raises:
        Stopped: a stop was requested.
    """
    curve = ToneCurve({"channels": channels_of(access.facts.image_shape)}).to(access.device)
    if sampler is not None and tones is not None:
        curve.table.copy_(fit_tones(sampler(), tones, frequencies))
    return curve


def fit_tones(sampler: Sampler, tones: Tones, frequencies: NDArray[np.float64] | None = None) -> Tensor:
    """The table of the curve that gives images as a model draws them the released tones, uint8 (channels, LEVELS).

    Args:
        sampler: of the model.
        tones: of as many channels as the images.
        frequencies: how often classes are drawn, float64 (classes,), of sum 1; None: equally often. The tones are those
            of all private images, so a class that is drawn too often would be taken for an error of the tones.

    Raises:
        Stopped: a stop was requested.
    """
    labels = None if frequencies is None else classes_by(frequencies, DRAWN)
    images = generate(sampler, DRAWN, labels, SEED, progress=lambda *_: check_stop()).images
    tables = []
    for levels, found in zip(np.moveaxis(images.reshape(-1, len(tones.shares)), 1, 0), tones.shares, strict=True):
        counts = np.bincount(levels, minlength=LEVELS)
        shares = likely_shares(found, shares_of_bins(counts), tones.noise)
        tables.append(gentle(matching_table(counts, shares), counts))
    return torch.from_numpy(np.stack(tables))


def classes_by(frequencies: NDArray[np.float64], count: int) -> list[int]:
    """Classes of `count` images in ascending order, as near as whole numbers are to the frequencies, (classes,)."""
    ends = frequencies.cumsum() / frequencies.sum()
    found: list[int] = np.searchsorted(ends, (np.arange(count) + 0.5) / count).tolist()
    return found


def matching_table(counts: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """A curve that gives pixels another distribution, uint8 (LEVELS,), not decreasing.

    A level becomes the one with the same share of pixels below it, half of those that are equal counted.

    Args:
        counts: pixels of each level, int64 (LEVELS,), not all 0.
        shares: of each bin in the other distribution, float64 (INNER + 2,), of sum 1.
    """
    below = (counts.cumsum() - counts / 2) / counts.sum()
    bins = bins_of_levels()
    lowest, highest = np.searchsorted(bins, np.arange(INNER + 2)), np.searchsorted(bins, np.arange(INNER + 2), "right")
    held = np.flatnonzero(shares > 0)
    end = shares[held].cumsum()
    # within a bin the levels are equally frequent
    known = np.stack([end - shares[held], end], 1).flatten()
    levels = np.interp(below, known, np.stack([lowest[held], highest[held] - 1], 1).flatten())
    return np.maximum.accumulate(levels.round()).astype(np.uint8)


def gentle(table: NDArray[np.uint8], counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The curve nearest to another one, by the sum over pixels, of those that nowhere rise by more than STEEPEST.

    Args:
        table: uint8 (LEVELS,), not decreasing.
        counts: pixels of each level, int64 (LEVELS,); levels without pixels count as one.
    """
    levels = np.arange(LEVELS)
    costs = (counts + 1.0)[:, None] * np.abs(levels - table[:, None].astype(np.float64))
    # dynamic programming: for each new level of a pixel the least cost of all levels below, and the rise to it
    least, rises = costs[0], np.zeros((LEVELS, LEVELS), np.int64)
    for level in range(1, LEVELS):
        before = sliding_window_view(np.concatenate([np.full(STEEPEST, np.inf), least]), STEEPEST + 1)
        least, rises[level] = before.min(1) + costs[level], STEEPEST - before.argmin(1)
    found = np.empty(LEVELS, np.uint8)
    found[-1] = least.argmin()
    for level in range(LEVELS - 1, 0, -1):
        found[level - 1] = found[level] - rises[level, found[level]]
    return found
