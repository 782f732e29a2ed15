"""The scheduler: how many rows each request gets in the next step, so that large requests hardly delay small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RIDERS = 0.15
"""Larger requests may make a step of smaller ones longer by this share, and no more."""
PEERS = 4
"""Requests with at most this many times the images of the smallest one are its peers,"""
SMALL = 16
"""and so are requests for at most this many images."""


class Load(NamedTuple):
    """A request as the scheduler sees it."""

    missing: int
    """Images that are not yet made."""
    rows: int
    """Candidates that could take part in the next step."""
    served: int = 0
    """Number of the step in which it last had rows."""
    client: str = ""
    """Who sent it."""


class Costs:
    """Seconds per step as a function of its rows: measured at some sizes, linear between and beyond them.

    Args:
        rows: measured sizes, ascending, >= 1.
        seconds: of a step of each size.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        # more rows never cost less: a measurement that says so is noise
        self._rows = np.array(rows, float)
        self._seconds = np.maximum.accumulate(np.array(seconds, float))

    def __call__(self, rows: int) -> float:
        """Seconds of a step with so many rows."""
        if rows > self._rows[-1]:
            return float(self._seconds[-1] * rows / self._rows[-1])
        return float(np.interp(rows, self._rows, self._seconds))

    def best_batch(self, longest: float, least: float = 0.98) -> int:
        """The smallest size with `least` of the best throughput, among those whose step takes at most `longest` s."""
        allowed = self._seconds <= longest
        allowed[0] = True
        rate = np.where(allowed, self._rows / self._seconds, 0)
        return int(self._rows[np.argmax(rate >= least * rate.max())])


def largest_peer(loads: Sequence[Load]) -> int:
    """The largest number of missing images with which a request is a peer of the smallest one; 0 without work."""
    ready = [load.missing for load in loads if load.rows]
    return max(PEERS * min(ready), SMALL) if ready else 0


def share(loads: Sequence[Load], batch: int, seconds: Callable[[int], float]) -> list[int]:
    """Rows of each request in the next step.

    The smallest request and its peers share the batch. If they have more rows than fit, each client gets as many as
    another one, however many requests it has, and so does each of its requests. Larger requests ride along in the
    remaining places, smaller ones first, as long as the step becomes at most `RIDERS` longer. So a small request takes
    little longer beside a large one than alone. A request that gets nothing has its turn later: see `Turns`.

    Args:
        loads: the requests, oldest first.
        batch: maximum rows of a step.
        seconds: duration of a step by its rows.
    """
    granted = [0] * len(loads)
    ready = [index for index, load in enumerate(loads) if load.rows]
    if not ready:
        return granted
    ascending = sorted(ready, key=lambda index: loads[index].missing)
    bound = largest_peer(loads)
    peers = [index for index in ascending if loads[index].missing <= bound]
    by_client: dict[str, list[int]] = {}
    for index in peers:
        by_client.setdefault(loads[index].client, []).append(index)
    parts = _evenly([sum(loads[index].rows for index in own) for own in by_client.values()], batch)
    for own, places in zip(by_client.values(), parts, strict=True):
        # of more requests than places those that have waited longest
        chosen = own if len(own) <= places else sorted(own, key=lambda index: loads[index].served)[:places]
        for index, got in zip(chosen, _evenly([loads[index].rows for index in chosen], places), strict=True):
            granted[index] = got
    left = batch - sum(granted)
    allowed = (1 + RIDERS) * seconds(batch - left)
    for index in ascending[len(peers) :]:
        while left and granted[index] < loads[index].rows and seconds(batch - left + 1) <= allowed:
            granted[index] += 1
            left -= 1
    return granted


def _evenly(wanted: Sequence[int], places: int) -> list[int]:
    """Of so many places the part of each, who wants so many: what one does not need goes to the others."""
    parts = [0] * len(wanted)
    for position, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        parts[index] = min(wanted[index], -(-places // (len(wanted) - position)))
        places -= parts[index]
    return parts


class Turns:
    """Steps of their own for requests that `share` passes over, so that small requests never starve a large one.

    While `share` passes over requests, they earn `RIDERS` times the duration of every step. As soon as they have earned
    a step with all their rows, they get it; the request that has waited longest goes first. So they get at least an
    eighth of the time, and the others the rest. In a step that passes over nobody, the larger requests pay for their
    own time in it.
    """

    def __init__(self) -> None:
        self._earned = 0.0

    def correct(
        self, loads: Sequence[Load], granted: list[int], batch: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """Return what `share` granted, or a turn of the requests that it passed over; arguments as in `share`."""
        # a client's own requests wait for each other, and not at the cost of other clients
        bound, served = largest_peer(loads), {load.client for load, rows in zip(loads, granted, strict=True) if rows}
        passed = [
            index
            for index, load in enumerate(loads)
            if load.rows and not granted[index] and (load.missing > bound or load.client not in served)
        ]
        if not passed:
            self._earned = self._balance(loads, granted, seconds)
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

    def _balance(self, loads: Sequence[Load], granted: list[int], seconds: Callable[[int], float]) -> float:
        """What the larger requests have earned after a step in which they took part: less their own time in it."""
        bound, total = largest_peer(loads), sum(granted)
        if not total:
            return self._earned
        larger = [rows for load, rows in zip(loads, granted, strict=True) if load.rows and load.missing > bound]
        theirs = seconds(total) * sum(larger) / total
        return max(0.0, self._earned + RIDERS * (seconds(total) - theirs) - theirs) if larger else 0.0
