"""A request for images: how many of which classes, and the bookkeeping of its candidates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid.sampling.acceptance import Acceptance, AcceptanceRate, Accepted, Tally


class Request:
    """A request for `count` images, with the state of its candidates: to draw, in flight, pending, accepted.

    A candidate has a number, and with the seed its own noise stream. Without a probe, candidate n is the image of
    place n. With one, candidates are drawn for the places in turn, round after round, and accepted as `Acceptance`
    describes, until all places are filled or `attempts` rounds are over. A candidate whose class has no open place any
    more is skipped, and need not be made.

    Candidates are offered in the order of their numbers; one that finishes early is pending until its predecessors
    have finished. So the result does not depend on when candidates are drawn or finish, nor on other requests.

    Args:
        count: number of images.
        labels: class of each, int64 (count,); None for a model without classes.
        seed: of the noise streams.
        attempts: candidates per image, at most and on average; more rounds follow if too few are left to fill all
            places. 1 means no probe.
        steps: sampling steps; None takes the generator's.
        rate: acceptance rate of the model; it decides only how many candidates are drawn at a time.
        confidence: see `Acceptance`.
    """

    def __init__(
        self,
        count: int,
        labels: NDArray[np.int64] | None,
        seed: int,
        attempts: int,
        steps: int | None = None,
        rate: AcceptanceRate | None = None,
        confidence: float = 0.0,
    ) -> None:
        self.count = count
        self.labels = labels
        self.seed = seed
        self.steps = steps
        self.missing = count
        """Number of open places."""
        self.tally = Tally()
        """What the probe found in the candidates so far; empty without a probe."""
        self._rate = rate or AcceptanceRate()
        probed = labels is not None and attempts > 1
        self._acceptance = Acceptance(labels, confidence) if probed and labels is not None else None
        self._limit = count * attempts if probed else count
        # without a probe all places share one pool
        pools = labels if probed and labels is not None else np.zeros(count, np.int64)
        self._pools = {label: _Pool(np.flatnonzero(pools == label)) for label in np.unique(pools).tolist()}
        self._label_of = pools.tolist()
        self._next = 0
        self._pending: dict[int, tuple[NDArray[np.uint8], NDArray[np.float32] | None]] = {}

    @property
    def wants(self) -> int:
        """Number of candidates to draw now so that those in flight probably suffice."""
        return self._wanted_now(self._expected_rate)

    @property
    def drawn(self) -> int:
        """Number of candidates drawn so far."""
        return sum(pool.drawn for pool in self._pools.values())

    @property
    def least(self) -> int:
        """Number of candidates to draw now so that those in flight suffice if all are accepted."""
        return self._wanted_now(1.0)

    def draw(self, limit: int, *, sparing: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Draw at most `limit` new candidates, those with the lowest numbers first.

        Args:
            limit: may be below 0, which counts as 0.
            sparing: draw at most `least` instead of `wants`: it takes longer, and fewer candidates are made in vain.

        Returns:
            Their numbers, int64 (n,), ascending, and their classes, int64 (n,), or None without classes.
        """
        limit, drawn, rate = max(0, limit), [], 1.0 if sparing else self._expected_rate
        for pool in self._pools.values():
            wanted = min(limit, self._wanted(pool, rate))
            drawn += [pool.number(pool.drawn + later, self.count) for later in range(wanted)]
        # later candidates would stay pending until the first ones finish
        drawn = sorted(drawn)[:limit]
        for number in drawn:
            self._pool(number).draw()
        numbers = np.array(drawn, np.int64)
        return numbers, None if self.labels is None else self.labels[numbers % self.count]

    def preview(self, limit: int, count: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """What the next `count` calls of `draw` return if nothing is offered meanwhile; nothing counts as drawn."""
        before = [(pool, pool.drawn, pool.in_flight) for pool in self._pools.values()]
        drawn = [self.draw(limit) for _ in range(count)]
        for pool, earlier, in_flight in before:
            pool.drawn, pool.in_flight = earlier, in_flight
        return drawn

    def needs(self, number: int) -> bool:
        """Whether a candidate in flight can still matter."""
        return self._pool(number).open > 0

    def abandon(self, number: int) -> None:
        """Give up a candidate in flight that is not needed any more."""
        self._pool(number).in_flight -= 1

    def offer(
        self, numbers: NDArray[np.int64], images: NDArray[np.uint8], probabilities: NDArray[np.float32] | None
    ) -> list[Accepted]:
        """Offer finished candidates, in any order; return the places that are filled now.

        Args:
            numbers: of the candidates, int64 (n,).
            images: uint8 (n, H, W) or (n, H, W, 3).
            probabilities: of the classes, by the probe, float32 (n, classes); None without a probe.
        """
        for row, number in enumerate(numbers.tolist()):
            self._pool(number).in_flight -= 1
            if number >= self._next:
                self._pending[number] = (images[row], None if probabilities is None else probabilities[row])
        accepted: list[Accepted] = []
        offered = 0
        while self.missing > len(accepted) and self._next < self._limit:
            number = self._next
            if not self.needs(number):
                self._pending.pop(number, None)
            elif number in self._pending:
                image, chances = self._pending.pop(number)
                if self.labels is not None and chances is not None and self._acceptance is not None:
                    self.tally.add(int(self.labels[number % self.count]), self._acceptance.found(chances))
                accepted += self._accept(number, image, chances)
                offered += 1
            else:
                break
            self._next += 1
        self._rate.add(len(accepted), offered)
        if self._acceptance is not None and self.missing > len(accepted) and self._next == self._limit:
            if self._acceptance.can_fill:
                accepted += self._acceptance.fill()
            else:
                # places of other classes accepted candidates, and the reserve is too small: one more round
                self._limit += self.count
        self.missing -= len(accepted)
        return accepted

    @property
    def _expected_rate(self) -> float:
        return 1.0 if self._acceptance is None else self._rate.value

    def _wanted_now(self, rate: float) -> int:
        return sum(self._wanted(pool, rate) for pool in self._pools.values() if pool.open)

    def _pool(self, number: int) -> _Pool:
        """The pool of a candidate, by its number."""
        return self._pools[self._label_of[number % self.count]]

    def _wanted(self, pool: _Pool, rate: float) -> int:
        """Number of candidates of one class to draw now."""
        left = self._limit // self.count * len(pool.places) - pool.drawn
        return max(0, min(left, round(pool.open / rate) - pool.in_flight))

    def _accept(
        self, number: int, image: NDArray[np.uint8], probabilities: NDArray[np.float32] | None
    ) -> list[Accepted]:
        if self._acceptance is None or probabilities is None:
            accepted = [Accepted(number, number, image, probabilities)]
        else:
            accepted = self._acceptance.offer(number, image, probabilities)
        for one in accepted:
            self._pool(one.place).open -= 1
        return accepted


class _Pool:
    """The places of one class, and the candidates that are drawn for them.

    Args:
        places: int64 (n,), ascending.
    """

    def __init__(self, places: NDArray[np.int64]) -> None:
        self.places = places
        self.open = len(places)
        self.drawn = 0
        self.in_flight = 0

    def number(self, index: int, count: int) -> int:
        """The number of the `index`-th candidate of this class: one for each place in turn, round after round."""
        turn, place = divmod(index, len(self.places))
        return turn * count + int(self.places[place])

    def draw(self) -> None:
        """Count one more candidate as in flight."""
        self.drawn += 1
        self.in_flight += 1
