"""Sums over private images with Gaussian noise: the formulas of counts, means and histograms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid.dp.randomness import Randomness
from rapid.dp.releases import Release
from rapid.ranks import Ranks

ROUNDING_MARGIN = 2.0**-20


def clipped_rows(rows: Tensor, bound: float) -> Tensor:
    """Rows scaled down to an l2 norm of less than `bound`, float64 (n, d); a row with a non-finite number becomes zero.

    The norm is at most bound / (1 + ROUNDING_MARGIN). Pairwise sums of n rows are off by at most log2(n) n 2^-53
    bounds, so that for up to 2^26 rows rounding cannot lift the change by one row over `bound`.

    Args:
        rows: (n, ...), one row per example.
        bound: the sensitivity of their sum.
    """
    # not flatten(1) or -1: rows may be scalars, and there may be none
    flat = rows.detach().double().reshape(len(rows), math.prod(rows.shape[1:]))
    flat = torch.where(flat.isfinite().all(1, keepdim=True), flat, 0.0)
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    least = bound / (1 + ROUNDING_MARGIN)
    clipped: Tensor = flat * (least / norms.clamp_min(least))
    return clipped


def noisy_sum(own: Tensor, release: Release, ranks: Ranks, randomness: Randomness | None = None) -> Tensor:
    """The sum over all ranks with Gaussian noise of standard deviation `release.noise_stddev`, the same on all ranks.

    Formal guarantee: one image changes the sum by at most the release's sensitivity in l2, so this is the Gaussian
    mechanism, rounded to a public grid (see `rapid.dp.noise`). Only the first rank adds noise, from the stream cipher.

    Args:
        own: sum of this rank's examples, float64 (d,), private.
        release: the release that is spent.
        ranks: the processes that share the work.
        randomness: of the noise, by default the stream cipher.

    Raises:
        LostRank: another rank is gone.
    """
    total = own.detach().cpu().double().clone()
    ranks.all_reduce(total)
    if ranks.first:
        (randomness or Randomness()).add_noise(total, release.noise_stddev)
    else:
        total.zero_()
    ranks.all_reduce(total)
    return total
