"""Sums over private images with Gaussian noise: the formulas of counts, means and histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rapid.dp.randomness import Randomness
from rapid.dp.releases import Release
from rapid.ranks import Ranks

ROUNDING_MARGIN = 2.0**-20
MOVED_MARGIN = 2.0**-8
"""Where people are the units. Rows come from float32 networks, batch by batch, and their last bits move with the number
of rows before them, which is private; measured were shifts of a sum by 5e-6 bounds, with 6,000 rows that are alike."""


def clipped_rows(rows: Tensor, bound: float, margin: float = ROUNDING_MARGIN) -> Tensor:
    """Rows scaled down to an l2 norm of less than `bound`, float64 (n, d); a row with a non-finite number becomes zero.

    The norm is at most bound / (1 + margin). Pairwise sums of n rows are off by at most log2(n) n 2^-53 bounds, so that
    with `ROUNDING_MARGIN` and up to 2^26 rows rounding cannot lift the change by one row over `bound`.

    Args:
        rows: (n, ...), one row per example.
        bound: the sensitivity of their sum.
        margin: what is left for rounding, as a share of the bound.
    """
    # not flatten(1) or -1: rows may be scalars, and there may be none
    flat = rows.detach().double().reshape(len(rows), math.prod(rows.shape[1:]))
    flat = torch.where(flat.isfinite().all(1, keepdim=True), flat, 0.0)
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    least = bound / (1 + margin)
    clipped: Tensor = flat * (least / norms.clamp_min(least))
    return clipped


def pairwise_sum(terms: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor, all of one shape; each is added to sums of as many terms, and few are held."""
    sums: list[tuple[int, Tensor]] = []
    for term in terms:
        count, total = 1, term
        while sums and sums[-1][0] == count:
            total = sums.pop()[1] + total
            count *= 2
        sums.append((count, total))
    _, whole = sums.pop()
    while sums:
        whole = sums.pop()[1] + whole
    return whole


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
