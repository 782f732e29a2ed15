"""Choosing knowledge base records: one of the nearest to a query, or, without a query, one of a class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rapid.methods.rapid.search import Search


def choose_neighbours(
    search: Search,
    queries: Tensor,
    neighbours: int,
    uniforms: NDArray[np.floating] | None,
) -> NDArray[np.int64]:
    """One of the nearest records of each query.

    Args:
        search: of the knowledge base.
        queries: float (n, key_dim), on any device.
        neighbours: how many of the nearest to choose from, 1 <= neighbours <= records.
        uniforms: independent numbers from [0, 1), (n,); None takes the nearest.

    Returns:
        Indices into the knowledge base, int64 (n,).
    """
    if uniforms is None:
        return search.nearest(queries, 1)[:, 0]
    indices = search.nearest(queries, neighbours)
    rank = np.minimum((uniforms * neighbours).astype(np.int64), neighbours - 1)
    return indices[np.arange(len(indices)), rank]


class ClassRecords:
    """Draws records for classes: first a public class, in proportion to its similarity, then one of its records.

    A class that resembles no public class with records gets any record.

    Args:
        likeness: weights >= 0, (classes, public_classes); see `Probe.resemblance`.
        record_labels: public class of each record, int64 (M,); larger ones, such as the null label, mean none.

    Raises:
        ValueError: no record has a class.
    """

    def __init__(self, likeness: NDArray[np.floating], record_labels: NDArray[np.int64]) -> None:
        public_classes = likeness.shape[1]
        known = record_labels < public_classes
        if not known.any():
            raise ValueError("no record of the knowledge base has a class")
        self._counts = np.bincount(record_labels[known], minlength=public_classes)
        self._order = np.argsort(np.where(known, record_labels, public_classes), kind="stable")
        self._starts = np.cumsum(self._counts) - self._counts
        weights = np.where(self._counts > 0, likeness.astype(np.float64), 0.0)
        weights[weights.sum(1) == 0] = self._counts
        self._cumulative = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1)

    def choose(self, labels: NDArray[np.int64], uniforms: NDArray[np.floating]) -> NDArray[np.int64]:
        """Draw one record for each class.

        Args:
            labels: wanted classes, int64 (n,).
            uniforms: independent numbers from [0, 1), (n, 2).

        Returns:
            Indices into the knowledge base, int64 (n,).
        """
        rows = self._cumulative[labels]
        # scaled by the last sum: rounding must not lead past the last class with a weight
        public = (rows <= (uniforms[:, :1] * rows[:, -1:])).sum(1)
        rank = (uniforms[:, 1] * self._counts[public]).astype(np.int64)
        chosen: NDArray[np.int64] = self._order[self._starts[public] + np.minimum(rank, self._counts[public] - 1)]
        return chosen
