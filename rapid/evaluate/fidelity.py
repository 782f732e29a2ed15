"""How near one set of feature vectors is to another: Frechet distance, precision, recall, density, coverage.

Everything works on features, float64 (N, d), whatever made them. Distances between the sets are computed in blocks of
`BLOCK` numbers and never kept: 60,000 against 60,000 needs a few hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.errors import InputError

NEIGHBOURS = 5
BLOCK = 1 << 23
"""Distances in memory at a time: 64 MB of float64."""

Features = NDArray[np.float64]


class Neighbourhoods(NamedTuple):
    """What the balls around the vectors of a set, each as far as its k-th neighbour of the set, say of another set."""

    precision: float
    """Share of synthetic vectors inside the ball of at least one real vector (Kynkaanniemi et al. 2019)."""
    recall: float
    """Share of real vectors inside the ball of at least one synthetic vector (the same)."""
    density: float
    """Real balls that a synthetic vector lies in, on average, over k (Naeem et al. 2020); may exceed 1."""
    coverage: float
    """Share of real balls with at least one synthetic vector inside (the same)."""


def frechet_distance(first: Features, second: Features) -> float:
    """Squared Frechet distance of the Gaussians with the sets' means and covariances (Dowson and Landau 1982).

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), never negative. With C1 = A'A and C2 = B'B the trace of the root is the
    sum of the singular values of AB', which exist for singular covariances too.

    Args:
        first: float64 (N, d), N >= 2.
        second: float64 (M, d), M >= 2.

    Raises:
        InputError: a set of fewer than two vectors.
    """
    if min(len(first), len(second)) < 2:
        raise InputError("the Frechet distance needs at least 2 images in each set; give more")
    a, b = _covariance_root(first), _covariance_root(second)
    offset = first.mean(0) - second.mean(0)
    overlap = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    return max(0.0, float(offset @ offset + np.square(a).sum() + np.square(b).sum() - 2 * overlap))


def _covariance_root(features: Features) -> Features:
    """A, (min(N, d), d), such that A'A is the covariance."""
    centred: Features = (features - features.mean(0)) / np.sqrt(len(features) - 1)
    if len(features) <= features.shape[1]:
        return centred
    values, vectors = np.linalg.eigh(centred.T @ centred)
    root: Features = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    return root


def neighbourhoods(
    real: Features,
    synthetic: Features,
    k: int = NEIGHBOURS,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] | None = None,
) -> Neighbourhoods:
    """Precision, recall, density and coverage; a vector on the border of a ball is outside, as in the package prdc.

    Args:
        real: float64 (N, d).
        synthetic: float64 (M, d).
        k: which neighbour bounds a ball, 1 <= k < min(N, M).
        device: where to compute.
        advance: called with the number of rows done, 2 N + M in all.

    Edge cases:

        equal sets                        precision, recall and coverage 1 unless more than k vectors coincide
        more than k vectors coincide      their balls are empty

    Raises:
        InputError: k is not smaller than the sets.
    """
    if not 1 <= k < min(len(real), len(synthetic)):
        raise InputError(
            f"{len(real)} real and {len(synthetic)} synthetic images: precision, recall, density and coverage with "
            f"k = {k} need at least {k + 1} in each set; give more"
        )
    centre = real.mean(0)
    a, b = (torch.from_numpy(x - centre).to(device) for x in (real, synthetic))
    advance = advance or (lambda rows: None)
    real_radii, synthetic_radii = _radii(a, k, advance), _radii(b, k, advance)
    balls = torch.zeros(len(b), dtype=torch.int64, device=b.device)
    recalled, covered = 0, 0
    for start, distances in _blocks(a, b):
        radii = real_radii[start : start + len(distances), None]
        inside = distances < radii
        balls += inside.sum(0)
        covered += int(inside.any(1).sum())
        recalled += int((distances < synthetic_radii).any(1).sum())
        advance(len(distances))
    return Neighbourhoods(
        precision=float((balls > 0).double().mean()),
        recall=recalled / len(a),
        density=float(balls.double().mean()) / k,
        coverage=covered / len(a),
    )


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
    """Squared distances of some rows of `a` to all of `b` at a time, with the number of the first row."""
    rows = max(1, BLOCK // len(b))
    norms = b.square().sum(1)
    for start in range(0, len(a), rows):
        part = a[start : start + rows]
        distances = torch.addmm(norms, part, b.T, alpha=-2).add_(part.square().sum(1, keepdim=True))
        yield start, distances.clamp_(min=0)
