"""An order: so many images of these classes from this seed, and the candidates from which they are taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid.sampling.acceptance import Placed, Selection


class Odds:
    """How often a candidate is taken, of all that a generator has made: two of four before there are any."""

    def __init__(self) -> None:
        self._taken, self._offered = 2.0, 4.0

    @property
    def of_taking(self) -> float:
        """The share that is taken."""
        return self._taken / self._offered

    def add(self, taken: int, offered: int) -> None:
        """Count some candidates."""
        self._taken += taken
        self._offered += offered


class Order:
    """What is asked for, what is under way, and what is done.

    Candidate n of a seed has its own noise stream. Without a probe it is the image of place n. With one, candidates
    are drawn for the places in turn, again and again, and each goes to a place of the class that the probe sees in it
    (see `Selection`), until all places are filled or `attempts` times as many candidates were drawn. One that was drawn
    for a class of which no place is open any more does not count, whatever it is; so it need not be made. Candidates
    count in the order of their numbers, whenever they are finished: what is asked for at the same time changes nothing.

    Args:
        count: number of images.
        labels: class of each, int64 (count,); None for a model without classes.
        seed: of the noise.
        attempts: candidates for an image, on average and at most, unless there are too few left to fill all places;
            1: no probe.
        steps: network calls from T to 0 if nothing were skipped; None as the generator's settings say.
        odds: of the generator; only how many candidates are drawn at a time depends on them.
    """

    def __init__(
        self,
        count: int,
        labels: NDArray[np.int64] | None,
        seed: int,
        attempts: int,
        steps: int | None = None,
        odds: Odds | None = None,
    ) -> None:
        self.count = count
        self.labels = labels
        self.seed = seed
        self.steps = steps
        self.missing = count
        """Images that are not yet there."""
        self._odds = odds or Odds()
        probed = labels is not None and attempts > 1
        self._selection = Selection(labels) if probed and labels is not None else None
        self._most = count * attempts if probed else count
        # without a probe there is one kind of candidate
        kinds = labels if probed and labels is not None else np.zeros(count, np.int64)
        self._kinds = {kind: _Kind(np.flatnonzero(kinds == kind)) for kind in np.unique(kinds).tolist()}
        self._kind_of = kinds.tolist()
        self._following = 0
        self._early: dict[int, tuple[NDArray[np.uint8], NDArray[np.float32] | None]] = {}

    @property
    def wants(self) -> int:
        """Candidates to draw now, so that those in flight will probably be enough."""
        odds = 1.0 if self._selection is None else self._odds.of_taking
        return sum(self._wanted(kind, odds) for kind in self._kinds.values() if kind.open)

    def draw(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Up to `most` new candidates: their numbers, int64 (n,), and the classes they are drawn for, or None."""
        most, drawn = max(0, most), []
        odds = 1.0 if self._selection is None else self._odds.of_taking
        for kind in self._kinds.values():
            wanted = min(most, self._wanted(kind, odds))
            drawn += [kind.number(kind.drawn + later, self.count) for later in range(wanted)]
        # the first ones first: others may have to wait for them
        drawn = sorted(drawn)[:most]
        for number in drawn:
            self._kinds[self._kind_of[number % self.count]].draw()
        numbers = np.array(drawn, np.int64)
        return numbers, None if self.labels is None else self.labels[numbers % self.count]

    def needs(self, number: int) -> bool:
        """Whether a candidate that was drawn still counts."""
        return self._kinds[self._kind_of[number % self.count]].open > 0

    def abandon(self, number: int) -> None:
        """A candidate that does not count is not made to the end."""
        self._kinds[self._kind_of[number % self.count]].flying -= 1

    def offer(
        self, numbers: NDArray[np.int64], images: NDArray[np.uint8], probabilities: NDArray[np.float32] | None
    ) -> list[Placed]:
        """Take finished candidates, in any order; returns the places that are filled by them.

        Args:
            numbers: which they are, int64 (n,).
            images: uint8 (n, H, W) or (n, H, W, 3).
            probabilities: of each class, by the probe, float32 (n, classes); None without a probe.
        """
        for row, number in enumerate(numbers.tolist()):
            self._kinds[self._kind_of[number % self.count]].flying -= 1
            if number >= self._following:
                self._early[number] = (images[row], None if probabilities is None else probabilities[row])
        placed: list[Placed] = []
        offered = 0
        while self.missing > len(placed) and self._following < self._most:
            number = self._following
            if not self.needs(number):
                self._early.pop(number, None)
            elif number in self._early:
                placed += self._place(number, *self._early.pop(number))
                offered += 1
            else:
                break
            self._following += 1
        self._odds.add(len(placed), offered)
        if self._selection is not None and self.missing > len(placed) and self._following == self._most:
            if self._selection.can_fill:
                placed += self._selection.fill()
            else:
                # candidates of open classes went to places of others, whose own were then not made: one more round
                self._most += self.count
        self.missing -= len(placed)
        return placed

    def _wanted(self, kind: _Kind, odds: float) -> int:
        """Candidates of one kind to draw now: of two chances in three no more than one for an open place."""
        wanted = round(kind.open / odds) - kind.flying
        return max(0, min(self._most // self.count * len(kind.places) - kind.drawn, wanted))

    def _place(self, number: int, image: NDArray[np.uint8], chances: NDArray[np.float32] | None) -> list[Placed]:
        if self._selection is None or chances is None:
            placed = [Placed(number, number, image)]
        else:
            placed = self._selection.offer(number, image, chances)
        for one in placed:
            self._kinds[self._kind_of[one.place]].open -= 1
        return placed


class _Kind:
    """The candidates that are drawn for one class.

    Args:
        places: those that want it, ascending.
    """

    def __init__(self, places: NDArray[np.int64]) -> None:
        self.places = places
        self.open = len(places)
        self.drawn = 0
        self.flying = 0

    def number(self, which: int, count: int) -> int:
        """The number of the candidate that is drawn as the `which`-th of this kind: for the places in turn."""
        again, place = divmod(which, len(self.places))
        return again * count + int(self.places[place])

    def draw(self) -> None:
        """Count one more."""
        self.drawn += 1
        self.flying += 1
