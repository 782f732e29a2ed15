"""An order: so many images of these classes from this seed, and the candidates from which they are taken."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rapid.selection import Placed, Selection

OTHERS = 8
"""So many candidates of other orders count like an order's own."""


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

    Candidate n of a seed has a noise stream of its own. Without a judge it is the image of place n. With one,
    candidates are drawn for the wanted classes in turn, and each goes where the judge would have it (see `Selection`),
    until all places are filled or `attempts` times as many candidates were drawn. Candidates count in the order of
    their numbers, whenever they are finished: what is asked for at the same time changes nothing.

    Args:
        count: number of images.
        labels: class of each, int64 (count,); None for a model without classes.
        seed: of the noise.
        attempts: candidates for an image, on average and at most; 1: no judge.
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
        self.in_flight = 0
        """Candidates that were drawn and not yet offered."""
        self._judged = labels is not None and attempts > 1
        self._selection = Selection(labels) if self._judged and labels is not None else None
        self._wanted = None if labels is None else np.unique(labels)
        self._most = count * attempts if self._judged else count
        self._odds = odds or Odds()
        self._drawn = self._offered = self._placed = 0
        self._early: dict[int, tuple[NDArray[np.uint8], NDArray[np.float32] | None]] = {}

    @property
    def missing(self) -> int:
        """Images that are not yet there."""
        return self.count - self._placed

    @property
    def wants(self) -> int:
        """Candidates to draw now, so that those in flight will probably be enough."""
        if self._selection is None:
            return self._most - self._drawn
        # its own odds, which depend on the classes, but at the beginning those of all orders
        taken = (self._placed + OTHERS * self._odds.of_taking) / (self._offered + OTHERS)
        return max(0, min(self._most - self._drawn, math.ceil(self.missing / taken) - self.in_flight))

    def draw(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Up to `most` new candidates: their numbers, int64 (n,), and the classes they are drawn for, or None."""
        numbers = np.arange(self._drawn, self._drawn + min(most, self.wants))
        self._drawn += len(numbers)
        self.in_flight += len(numbers)
        if self._wanted is None or self.labels is None:
            return numbers, None
        if self._selection is None:
            return numbers, self.labels[numbers]
        return numbers, self._wanted[numbers % len(self._wanted)]

    def offer(
        self, numbers: NDArray[np.int64], images: NDArray[np.uint8], probabilities: NDArray[np.float32] | None
    ) -> list[Placed]:
        """Take finished candidates, in any order; returns the places that are filled by them.

        Args:
            numbers: which they are, int64 (n,).
            images: uint8 (n, H, W) or (n, H, W, 3).
            probabilities: of each class, by the judge, float32 (n, classes); None without a judge.
        """
        for row, number in enumerate(numbers.tolist()):
            self._early[number] = (images[row], None if probabilities is None else probabilities[row])
        self.in_flight -= len(numbers)
        placed: list[Placed] = []
        before = self._offered
        while self.missing > len(placed) and self._offered in self._early:
            image, chances = self._early.pop(self._offered)
            if self._selection is None or chances is None:
                placed.append(Placed(self._offered, self._offered, image))
            else:
                placed += self._selection.offer(self._offered, image, chances)
            self._offered += 1
        self._placed += len(placed)
        self._odds.add(len(placed), self._offered - before)
        if self._selection is not None and self.missing and self._offered == self._most:
            rest = self._selection.fill()
            self._placed += len(rest)
            placed += rest
        return placed
