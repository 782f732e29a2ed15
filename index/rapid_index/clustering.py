"""Clusters of rows, by faiss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .keys import load_faiss

ITERATIONS = 20


def cluster_centres(rows: NDArray[np.float32], count: int, seed: int) -> NDArray[np.float32]:
    """The centres of k-means clusters, float32 (min(count, n), d).

    Args:
        rows: float32 (n, d), finite.
        count: number of clusters, at least 1.
        seed: of the rows that it begins with.

    Raises:
        KnowledgeBaseError: faiss is not installed.

    """
    if len(rows) <= count:
        return rows
    settings = {"niter": ITERATIONS, "seed": seed + 1, "min_points_per_centroid": 1}
    clusters = load_faiss().Kmeans(rows.shape[1], count, **settings)
    clusters.train(np.ascontiguousarray(rows))
    centres: NDArray[np.float32] = clusters.centroids
    return centres
