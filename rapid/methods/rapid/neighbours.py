"""Which entries of the knowledge base are taken: one of the nearest to a query, or one for a class without a query."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rapid_index import KnowledgeBase


def choose_neighbours(
    knowledge_base: KnowledgeBase,
    queries: NDArray[np.float32],
    neighbours: int,
    uniforms: NDArray[np.floating] | None,
) -> NDArray[np.int64]:
    """One of the nearest entries of each query.

    Args:
        knowledge_base: where to search.
        queries: float32 (n, key_dim).
        neighbours: how many entries there are to choose from, 1 <= neighbours <= entries.
        uniforms: independent numbers from [0, 1), (n,); None takes the nearest.

    Returns:
        Indices into the knowledge base, int64 (n,).
    """
    if uniforms is None:
        return knowledge_base.search(queries).indices[:, 0]
    indices = knowledge_base.search(queries, neighbours).indices
    place = np.minimum((uniforms * neighbours).astype(np.int64), neighbours - 1)
    return indices[np.arange(len(indices)), place]


class ClassEntries:
    """Draws entries for classes: first a public class, by how much it looks like the wanted one, then an entry of it.

    A class that resembles no public class of which there are entries starts from any entry.

    Args:
        likeness: weights >= 0, (classes, public_classes); see `Probe.resemblance`.
        entry_labels: public class of each entry, int64 (M,).

    Raises:
        ValueError: no entry has a class.
    """

    def __init__(self, likeness: NDArray[np.floating], entry_labels: NDArray[np.int64]) -> None:
        public_classes = likeness.shape[1]
        # a null label, beyond the public classes, belongs to none of them
        known = entry_labels < public_classes
        self._counts = np.bincount(entry_labels[known], minlength=public_classes)
        self._order = np.argsort(np.where(known, entry_labels, public_classes), kind="stable")
        self._starts = np.cumsum(self._counts) - self._counts
        weights = np.where(self._counts > 0, likeness.astype(np.float64), 0.0)
        if not known.any():
            raise ValueError("no entry of the knowledge base has a class")
        weights[weights.sum(1) == 0] = self._counts
        self._cumulative = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1)

    def choose(self, labels: NDArray[np.int64], uniforms: NDArray[np.floating]) -> NDArray[np.int64]:
        """Entries for classes.

        Args:
            labels: wanted classes, int64 (n,).
            uniforms: independent numbers from [0, 1), (n, 2).

        Returns:
            Indices into the knowledge base, int64 (n,).
        """
        rows = self._cumulative[labels]
        # below the last sum, so that rounding never leads beyond the last class with a weight
        public = (rows <= (uniforms[:, :1] * rows[:, -1:])).sum(1)
        within = (uniforms[:, 1] * self._counts[public]).astype(np.int64)
        chosen: NDArray[np.int64] = self._order[self._starts[public] + np.minimum(within, self._counts[public] - 1)]
        return chosen
