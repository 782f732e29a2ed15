"""Which of many candidate images fill the places of an order, by what the probe sees in them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Placed(NamedTuple):
    """An image at its place."""

    place: int
    candidate: int
    """The number of the candidate that came there."""
    image: NDArray[np.uint8]
    """(H, W) or (H, W, 3)."""


class Selection:
    """The places of an order, each of which wants an image of one class.

    Candidates are offered in a fixed order. Each goes to the first open place that wants the class that the probe finds
    most likely in it, whatever class it was drawn for. So the image of a place depends on the candidates and on the
    places before it, not on how many places follow.

    Args:
        wanted: class of each place, int64 (N,).
    """

    def __init__(self, wanted: NDArray[np.int64]) -> None:
        self.missing = len(wanted)
        """Places that are still open."""
        self._open: dict[int, deque[int]] = defaultdict(deque)
        for place, label in enumerate(wanted.tolist()):
            self._open[label].append(place)
        self._spare: list[tuple[int, NDArray[np.uint8], NDArray[np.float32]]] = []

    def offer(self, candidate: int, image: NDArray[np.uint8], probabilities: NDArray[np.float32]) -> list[Placed]:
        """Take the next candidate; returns the place that it fills, if any.

        Args:
            candidate: its number.
            image: uint8 (H, W) or (H, W, 3).
            probabilities: of each class, by the probe, (classes,).
        """
        places = self._open.get(int(probabilities.argmax()))
        if not places:
            self._spare.append((candidate, image, probabilities))
            return []
        self.missing -= 1
        return [Placed(places.popleft(), candidate, image)]

    @property
    def can_fill(self) -> bool:
        """Whether enough is left for the places that are still open."""
        return self.missing <= len(self._spare)

    def fill(self) -> list[Placed]:
        """Fill the places that are still open with what is left.

        Each gets the candidate in which the probe finds its class most likely.

        Raises:
            ValueError: there were fewer candidates than places.
        """
        if self.missing > len(self._spare):
            raise ValueError(f"{self.missing} places are open, and {len(self._spare)} candidates are left")
        placed = []
        for label, places in sorted(self._open.items()):
            best = sorted(range(len(self._spare)), key=lambda index: -self._spare[index][2][label])[: len(places)]
            placed += [Placed(place, *self._spare[index][:2]) for place, index in zip(places, best, strict=True)]
            taken = set(best)
            self._spare = [spare for index, spare in enumerate(self._spare) if index not in taken]
            places.clear()
        self.missing = 0
        return placed
