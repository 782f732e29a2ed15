"""Which of many candidate images fill the places of a request, by what the judge sees in them."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray


class Selection:
    """The places of a request, each of which wants an image of one class.

    Candidates are offered in a fixed order. Each goes to the first open place that wants the class that the judge finds
    most likely in it, whatever class it was drawn for. So the image of a place depends on the candidates and on the
    places before it, not on how many places follow.

    Args:
        wanted: class of each place, int64 (N,).
    """

    def __init__(self, wanted: NDArray[np.int64]) -> None:
        self._wanted = wanted
        self._images: list[NDArray[np.uint8] | None] = [None] * len(wanted)
        self._open: dict[int, deque[int]] = defaultdict(deque)
        for place, label in enumerate(wanted.tolist()):
            self._open[label].append(place)
        self._spare: list[tuple[NDArray[np.uint8], NDArray[np.float32]]] = []

    @property
    def missing(self) -> int:
        """Places that are still open."""
        return sum(len(places) for places in self._open.values())

    def offer(self, images: NDArray[np.uint8], probabilities: NDArray[np.float32]) -> None:
        """Take the next candidates.

        Args:
            images: uint8 (n, H, W) or (n, H, W, 3).
            probabilities: of each class, by the judge, (n, classes).
        """
        for image, row in zip(images, probabilities, strict=True):
            places = self._open.get(int(row.argmax()))
            if places:
                self._images[places.popleft()] = image
            else:
                self._spare.append((image, row))

    def fill(self) -> NDArray[np.uint8]:
        """The images of all places, uint8 (N, H, W) or (N, H, W, 3).

        Places that are still open get what is left, each the candidate in which the judge finds its class most likely.

        Raises:
            ValueError: there were fewer candidates than places.
        """
        if self.missing > len(self._spare):
            raise ValueError(f"{self.missing} places are open, and {len(self._spare)} candidates are left")
        for label, places in sorted(self._open.items()):
            best = sorted(range(len(self._spare)), key=lambda index: -self._spare[index][1][label])[: len(places)]
            for place, index in zip(places, best, strict=True):
                self._images[place] = self._spare[index][0]
            taken = set(best)
            self._spare = [spare for index, spare in enumerate(self._spare) if index not in taken]
            places.clear()
        return np.stack([image for image in self._images if image is not None])
