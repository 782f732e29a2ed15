"""Acceptance by the probe: which candidates fill the places of a request, and how often a candidate is accepted."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rapid.mapped import empty, release


class AcceptanceRate:
    """Running share of candidates that are accepted, over all requests to a model.

    It starts from two accepted of four, so that it is defined before the first candidate and never 0.
    """

    def __init__(self) -> None:
        self._accepted, self._offered = 2.0, 4.0

    @property
    def value(self) -> float:
        """Accepted candidates as a share of those offered, in (0, 1]."""
        return self._accepted / self._offered

    def add(self, accepted: int, offered: int) -> None:
        """Count `offered` more candidates, `accepted` of which were accepted."""
        self._accepted += accepted
        self._offered += offered


class Tally:
    """How many candidates were offered of each class, and how many of them the probe found to be of it.

    A candidate that fills a place of another class counts as offered only, unlike in `AcceptanceRate`. Only those that
    were offered while their class had open places count.
    """

    def __init__(self) -> None:
        self.offered: Counter[int] = Counter()
        """Candidates by the class that they were drawn for."""
        self.accepted: Counter[int] = Counter()
        """Those that the probe found to be of their class."""

    def add(self, drawn: int, seen: int | None) -> None:
        """Count a candidate that was drawn for one class, and in which the probe saw a class, or none surely."""
        self.offered[drawn] += 1
        self.accepted[drawn] += drawn == seen

    @property
    def share(self) -> float | None:
        """The mean over the classes of the share that is accepted, in [0, 1]; None before the first candidate.

        Classes count alike, because more candidates are drawn for those that are accepted more rarely.
        """
        shares = [self.accepted[label] / count for label, count in self.offered.items()]
        return sum(shares) / len(shares) if shares else None


class Accepted(NamedTuple):
    """An image and the place in the request that it fills."""

    place: int
    candidate: int
    """The number of the candidate."""
    image: NDArray[np.uint8]
    """(H, W) or (H, W, 3)."""
    probabilities: NDArray[np.float32] | None
    """Of the classes, by the probe, (classes,); None without a probe."""


SLACK = 256
"""Candidates in reserve beyond twice the open places, so that small requests are not sorted at each offer."""


class Acceptance:
    """The places of a request, each of which needs an image of one class.

    Candidates are offered in a fixed order. The first open place of the class that the probe finds most likely accepts
    the candidate, whichever class it was drawn for. So the image of a place depends on the candidates and on the
    earlier places, not on how many places follow. Candidates that no place accepts are kept in reserve, as far as they
    could fill a place: at most twice as many as there are open places, and `SLACK`.

    Args:
        wanted: class of each place, int64 (N,).
        confidence: probability that a class needs for a candidate to be of it.
    """

    def __init__(self, wanted: NDArray[np.int64], confidence: float = 0.0) -> None:
        self.missing = len(wanted)
        """Number of open places."""
        self._confidence = confidence
        self._open: dict[int, deque[int]] = defaultdict(deque)
        for place, label in enumerate(wanted.tolist()):
            self._open[label].append(place)
        self._reserve = _Reserve()

    def offer(self, candidate: int, image: NDArray[np.uint8], probabilities: NDArray[np.float32]) -> list[Accepted]:
        """Offer the next candidate; return the place that accepts it, or an empty list.

        Args:
            candidate: its number.
            image: uint8 (H, W) or (H, W, 3).
            probabilities: of the classes, by the probe, float32 (classes,).
        """
        found = self.found(probabilities)
        places = None if found is None else self._open.get(found)
        if not places:
            self._reserve.append(candidate, image, probabilities)
            if len(self._reserve) > 2 * self.missing + SLACK:
                self._prune()
            return []
        self.missing -= 1
        return [Accepted(places.popleft(), candidate, image, probabilities)]

    def found(self, probabilities: NDArray[np.float32]) -> int | None:
        """The class of a candidate, or None if the probe is not sure enough of any."""
        likeliest = int(probabilities.argmax())
        return likeliest if probabilities[likeliest] >= self._confidence else None

    @property
    def reserved(self) -> int:
        """Number of candidates in reserve."""
        return len(self._reserve)

    @property
    def can_fill(self) -> bool:
        """Whether the reserve is large enough for all open places."""
        return self.missing <= len(self._reserve)

    def fill(self) -> list[Accepted]:
        """Fill all open places from the reserve.

        Class by class, the places get the candidates in which the probe finds their class most likely.

        Raises:
            ValueError: the reserve is too small.
        """
        if not self.can_fill:
            raise ValueError(f"{self.missing} places are open, but only {len(self._reserve)} candidates are in reserve")
        chosen = self._choice() if self.missing else {}
        filled = [
            Accepted(place, *self._reserve[index])
            for label, rows in chosen.items()
            for place, index in zip(self._open[label], rows, strict=True)
        ]
        self._open.clear()
        self._reserve = _Reserve()
        self.missing = 0
        return filled

    def _choice(self) -> dict[int, list[int]]:
        """For each class, in their order, the rows of the reserve that its open places get, the likeliest first."""
        left, chosen = np.arange(len(self._reserve)), {}
        probabilities = np.stack(self._reserve.probabilities)
        for label, places in sorted(self._open.items()):
            best = left[np.argsort(-probabilities[left, label], kind="stable")[: len(places)]]
            chosen[label] = best.tolist()
            left = np.setdiff1d(left, best)
        return chosen

    def _prune(self) -> None:
        """Drop what could fill no place: places only become fewer, so the choice among all is one among the chosen."""
        self._reserve.keep(sorted(index for rows in self._choice().values() for index in rows))


class _Reserve:
    """Candidates that no place has accepted yet, in their order; pixels of many are mapped from a file.

    Attributes:
        probabilities: of the classes, by the probe, float32 (classes,) for each candidate.
    """

    def __init__(self) -> None:
        self.probabilities: list[NDArray[np.float32]] = []
        self._numbers: list[int] = []
        self._pixels: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> tuple[int, NDArray[np.uint8], NDArray[np.float32]]:
        """Number, image and probabilities."""
        return self._numbers[row], self._pixels[row], self.probabilities[row]

    def append(self, candidate: int, image: NDArray[np.uint8], probabilities: NDArray[np.float32]) -> None:
        """Add a copy of a candidate: a view would keep its whole batch in memory."""
        held = len(self)
        if held == len(self._pixels):
            more = empty((max(SLACK, 2 * held), *image.shape))
            if held:
                more[:held] = self._pixels
                release()
            self._pixels = more
        self._pixels[held] = image
        self._numbers.append(candidate)
        self.probabilities.append(probabilities.copy())

    def keep(self, rows: list[int]) -> None:
        """Drop all but these rows, which are in ascending order."""
        for place, row in enumerate(rows):
            self._pixels[place] = self._pixels[row]
        release()
        self._numbers = [self._numbers[row] for row in rows]
        self.probabilities = [self.probabilities[row] for row in rows]
