"""Tones: how bright the pixels of private images are, in one noisy release; generated images are given the same ones.

A decoder that was trained by squared error draws soft edges, and a denoiser softens them further: too many pixels are
grey, and too few black or white. How sharp the private images are, public ones cannot tell. So the mean histogram of
pixels is released, by channel, and a curve maps the levels of generated images onto it (histogram matching).

Formal guarantee: one `mean` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from rapid.dp.access import PrivateAccess
from rapid.dp.releases import QuerySpec
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.tone_curve import LEVELS, NAME, ToneCurve
from rapid.sampling.streams import make_streams
from rapid.stopping import check_stop

INNER = 32
"""Bins of the levels 1 to 254; black and white have bins of their own, because many images have much of both."""
LARGEST_NOISE = 0.02
"""Standard deviation of the noise in a share of the pixels, above which images are left as they are."""
STEEPEST = 4
"""Levels by which the curve may rise from one level to the next: it must not magnify rounding, nor noise in a bin."""
DRAWN, SEED = 512, 0
"""Images that are compared with the release."""


def tones_spec(share: float, dataset_size: int) -> QuerySpec:
    """The release of the tones."""
    return QuerySpec(
        name=NAME,
        kind="mean",
        title="mean histogram of the brightness of pixels, by channel",
        share=share,
        sensitivity=1.0,
        dataset_size=dataset_size,
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
        access: its budget lists the release of `tones_spec`.
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


@torch.no_grad()
def fit_tones(parts: Parts, shares: NDArray[np.float64] | None, device: torch.device) -> ToneCurve:
    """The curve that gives images as the model draws them the released tones.

    Args:
        parts: of the trained bundle, without a curve.
        shares: of `release_tones`; None: the curve changes nothing.
        device: where to compute.

    Raises:
        Stopped: a stop was requested.
    """
    channels = parts.settings.image.channels
    curve = ToneCurve({"channels": channels}).to(device)
    if shares is None:
        return curve
    sampler = RapidSampler(parts, device, parts.settings.generation.model_copy(update={"attempts": 1}))
    counts = np.zeros((channels, LEVELS), np.int64)
    for start in range(0, DRAWN, sampler.batch_size):
        check_stop()
        numbers = np.arange(start, min(start + sampler.batch_size, DRAWN))
        labels = numbers % len(parts.classes) if parts.classes else None
        images = sampler.decode(sampler.sample(make_streams(SEED, numbers), labels)[1])
        pixels = images.reshape(-1, channels)
        counts += np.stack([np.bincount(pixels[:, channel], minlength=LEVELS) for channel in range(channels)])
    tables = [gentle(matching_table(*pair), pair[0]) for pair in zip(counts, shares, strict=True)]
    curve.table.copy_(torch.from_numpy(np.stack(tables)))
    return curve


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
