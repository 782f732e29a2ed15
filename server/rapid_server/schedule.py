"""Who may take the next step: small orders together, large ones beside them as far as that costs the small little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RIDERS = 0.25
"""Larger orders may slow a step of smaller ones by this share, and no more."""
PEERS = 4
"""Orders with at most so many times the images of the smallest one are served like it,"""
SMALL = 16
"""and so are those of at most so many images."""


class Load(NamedTuple):
    """An order as the scheduler sees it."""

    missing: int
    """Images that are not yet there."""
    rows: int
    """Candidates that could take a step."""
    served: int = 0
    """When some of them last took one, by the number of the step."""


class Costs:
    """Seconds of one step by the number of rows in it: measured at some, linear between and beyond them."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        # more rows never cost less; what says otherwise is noise
        self._rows = np.array(rows, float)
        self._seconds = np.maximum.accumulate(np.array(seconds, float))

    def __call__(self, rows: int) -> float:
        """Seconds of a step with so many rows."""
        if rows > self._rows[-1]:
            return float(self._seconds[-1] * rows / self._rows[-1])
        return float(np.interp(rows, self._rows, self._seconds))

    def best_batch(self, longest: float) -> int:
        """The fewest rows with nearly the most rows a second, of those whose step takes at most `longest` seconds."""
        allowed = self._seconds <= longest
        allowed[0] = True
        rate = np.where(allowed, self._rows / self._seconds, 0)
        return int(self._rows[np.argmax(rate >= 0.95 * rate.max())])


def largest_peer(loads: Sequence[Load]) -> int:
    """How many images the largest order may miss that is served like the smallest one; 0 if there is nothing to do."""
    ready = [load.missing for load in loads if load.rows]
    return max(PEERS * min(ready), SMALL) if ready else 0


def share(loads: Sequence[Load], batch: int, seconds: Callable[[int], float]) -> list[int]:
    """How many rows of each order take the next step.

    The smallest order and its peers share the batch, evenly where there are more rows than places. Places that are
    left go to the larger orders, the smaller first, as long as the step becomes at most `RIDERS` longer. So a small
    order beside a large one takes little longer than alone. Who has no place now has a turn later: see `Turns`.

    Args:
        loads: the orders, the earlier first.
        batch: most rows of a step.
        seconds: time of a step by its rows.
    """
    granted = [0] * len(loads)
    ready = [index for index, load in enumerate(loads) if load.rows]
    if not ready:
        return granted
    order = sorted(ready, key=lambda index: loads[index].missing)
    bound = largest_peer(loads)
    peers = [index for index in order if loads[index].missing <= bound]
    left = batch
    # the one with the fewest rows first: what it does not need is for the others
    for position, index in enumerate(sorted(peers, key=lambda index: loads[index].rows)):
        granted[index] = min(loads[index].rows, -(-left // (len(peers) - position)))
        left -= granted[index]
    allowed = (1 + RIDERS) * seconds(batch - left)
    for index in order[len(peers) :]:
        while left and granted[index] < loads[index].rows and seconds(batch - left + 1) <= allowed:
            granted[index] += 1
            left -= 1
    return granted


class Turns:
    """Steps for those whom `share` passes over, so that a stream of small orders never holds a large one for ever.

    While some are passed over they earn the share `RIDERS` of the time that the others take. What is earned pays for a
    step of their own, of as many rows as they have: who waited longest goes first. So they have a fifth of the time,
    and the others, over several steps, all the rest.
    """

    def __init__(self) -> None:
        self._earned = 0.0

    def correct(
        self, loads: Sequence[Load], granted: list[int], batch: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """What `share` granted, or the turn of those that it passed over; see `share` for the arguments."""
        passed = [index for index, load in enumerate(loads) if load.rows and not granted[index]]
        if not passed:
            if any(granted):
                # where nobody may take a step, nobody is served either
                self._earned = 0.0
            return granted
        rows = min(batch, sum(loads[index].rows for index in passed))
        if self._earned < seconds(rows):
            self._earned += RIDERS * seconds(sum(granted))
            return granted
        self._earned = 0.0
        turn = [0] * len(loads)
        for index in sorted(passed, key=lambda index: loads[index].served):
            turn[index] = min(loads[index].rows, rows)
            rows -= turn[index]
        return turn
