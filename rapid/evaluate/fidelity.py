"""Precision, recall, density and coverage of two sets of feature vectors.

Features are float64 (N, d), from any network. Pairwise distances are computed in blocks and not kept, so that 60,000
against 60,000 vectors needs a few hundred megabytes. The package prdc, with which the tests compare, needs 29 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rapid.errors import InputError
from rapid.frechet import Features

NEIGHBOURS = 5
BLOCK = 1 << 23
"""Distances in memory at a time, 64 MB of float64, and as many bounds of their rounding."""


class Neighbourhoods(NamedTuple):
    """Measures from balls around the vectors of each set; a ball's radius is the distance to the k-th neighbour."""

    precision: float
    """Share of synthetic vectors in the ball of at least one real vector (Kynkaanniemi et al. 2019)."""
    recall: float
    """Share of real vectors in the ball of at least one synthetic vector (Kynkaanniemi et al. 2019)."""
    density: float
    """Mean number of real balls that contain a synthetic vector, divided by k (Naeem et al. 2020); may exceed 1."""
    coverage: float
    """Share of real balls that contain at least one synthetic vector (Naeem et al. 2020)."""


def neighbourhoods(
    real: Features,
    synthetic: Features,
    k: int = NEIGHBOURS,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] | None = None,
) -> Neighbourhoods:
    """As `Balls(real, k, device, advance).compared(synthetic, advance)`."""
    return Balls(real, k, device, advance).compared(synthetic, advance)


class Balls:
    """A ball around each real vector, up to its k-th neighbour, with which several sets can be compared.

    Args:
        real: float64 (N, d).
        k: the neighbour that determines the radius, 1 <= k < N.
        device: where to compute.
        advance: called with the number of rows just done, N in total.

    Raises:
        InputError: k is not smaller than the set.
    """

    def __init__(
        self,
        real: Features,
        k: int = NEIGHBOURS,
        device: torch.device | str = "cpu",
        advance: Callable[[int], None] | None = None,
    ) -> None:
        _check(k, len(real), "real")
        self._k, self._device = k, device
        self._centre = real.mean(0)
        self._real = torch.from_numpy(real - self._centre).to(device)
        self._radii = _radii(self._real, k, advance or _ignore)

    def compared(self, synthetic: Features, advance: Callable[[int], None] | None = None) -> Neighbourhoods:
        """Compute precision, recall, density and coverage. A vector on the border of a ball is outside, as in prdc.

        Args:
            synthetic: float64 (M, d), M > k.
            advance: called with the number of rows just done, N + M in total.

        Edge cases:

            equal sets                        precision, recall and coverage 1 unless more than k vectors coincide
            more than k vectors coincide      their balls are empty

        Raises:
            InputError: k is not smaller than the set.
        """
        _check(self._k, len(synthetic), "synthetic")
        a, b = self._real, torch.from_numpy(synthetic - self._centre).to(self._device)
        advance = advance or _ignore
        synthetic_radii = _radii(b, self._k, advance)
        balls = torch.zeros(len(b), dtype=torch.int64, device=b.device)
        recalled, covered = 0, 0
        for start, distances in _blocks(a, b):
            inside = distances < self._radii[start : start + len(distances), None]
            balls += inside.sum(0)
            covered += int(inside.any(1).sum())
            recalled += int((distances < synthetic_radii).any(1).sum())
            advance(len(distances))
        return Neighbourhoods(
            precision=float((balls > 0).double().mean()),
            recall=recalled / len(a),
            density=float(balls.double().mean()) / self._k,
            coverage=covered / len(a),
        )


def _check(k: int, count: int, whose: str) -> None:
    if not 1 <= k < count:
        problem = f"precision, recall, density and coverage with k = {k} need at least {k + 1} images in each set"
        raise InputError("", f"{problem}, not {count} {whose} ones; give more")


def _ignore(rows: int) -> None:
    """In the place of progress."""


def _radii(x: Tensor, k: int, advance: Callable[[int], None]) -> Tensor:
    """Squared distance of each vector to its k-th neighbour, (N,)."""
    radii = torch.empty(len(x), dtype=x.dtype, device=x.device)
    for start, distances in _blocks(x, x):
        rows = torch.arange(len(distances), device=x.device)
        # a vector is not its own neighbour
        distances[rows, start + rows] = torch.inf
        radii[start : start + len(distances)] = distances.topk(k, dim=1, largest=False).values[:, -1]
        advance(len(distances))
    return radii


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Squared distances between some rows of `a` and all of `b`, with the index of the first row.

    What rounding alone may have made is 0, so that vectors that coincide have this distance with any order of the sums.
    """
    rows = max(1, BLOCK // len(b))
    # a sum of d squares or products has an error of at most d eps/2 of the sum of their sizes, and 2 ab <= aa + bb: all
    # three have d eps of aa + bb, and adding them up 2 eps at most; twice as much covers terms of second order
    rounding = 2 * (b.shape[1] + 2) * torch.finfo(b.dtype).eps
    norms = b.square().sum(1)
    for start in range(0, len(a), rows):
        part = a[start : start + rows]
        own = part.square().sum(1, keepdim=True)
        distances = torch.addmm(norms, part, b.T, alpha=-2).add_(own)
        # those below 0 as well
        yield start, distances.masked_fill_(distances < (norms + own).mul_(rounding), 0)
