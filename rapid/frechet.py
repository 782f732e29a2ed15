"""The Frechet distance between two sets of feature vectors, from any network."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid.errors import InputError

Features = NDArray[np.float64]
"""Vectors, float64 (N, d)."""


def frechet_distance(first: Features, second: Features) -> float:
    """Squared Frechet distance between Gaussians with the means and covariances of the sets (Dowson and Landau 1982).

    It is |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). With C1 = A'A and C2 = B'B, the trace of the square root is the
    sum of the singular values of AB', which is stable for singular covariances, unlike a matrix square root.

    Args:
        first: float64 (N, d), N >= 2.
        second: float64 (M, d), M >= 2.

    Raises:
        InputError: a set has fewer than two vectors.
    """
    if min(len(first), len(second)) < 2:
        raise InputError("", "the Frechet distance needs at least 2 images in each set; give more")
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
