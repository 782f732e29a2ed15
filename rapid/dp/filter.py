"""A Renyi privacy filter: a limit on spending that also holds if plans are chosen after earlier results were seen.

The order is fixed with the limit. A run is admitted if the Renyi divergences of this order, summed over everything that
was charged and the new run, stay within what the limit allows; then everything together is (epsilon, delta)-DP, however
the runs were chosen (Feldman and Zrnic 2021, theorem 4.3; Lecuyer 2021). Numerical composition of privacy losses gives
tighter figures, but has this guarantee only for plans that were fixed in advance.

The order is a whole number: at fractional orders the series of both accountant libraries can fail to converge, with
negative or infinite results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dp_accounting import DpEvent

from rapid.dp.accounting import rdp_at_order

LARGEST_ORDER = 1000
"""Of a filter; a limit far below 0.01 would have a larger one."""
TOLERANCE = 1e-9
"""Relative tolerance for sums in another order."""


@dataclass(frozen=True)
class RenyiFilter:
    """The filter of one limit.

    Formal guarantee: as long as `admits` held before each release, for everything released so far and that release, all
    releases together are (epsilon, delta)-DP, for releases that are chosen adaptively. Adjacency is that of the events.

    Attributes:
        epsilon: of the limit, > 0.
        delta: of the limit, in (0, 1).
        order: Renyi order, a whole number of at least 2, chosen before anything is released.
    """

    epsilon: float
    delta: float
    order: int

    @classmethod
    def of(cls, epsilon: float, delta: float, order: int | None = None) -> Self:
        """The filter of a limit; the default order is `best_order`."""
        return cls(epsilon, delta, best_order(epsilon, delta) if order is None else order)

    @property
    def budget(self) -> float:
        """Largest Renyi divergence that the limit allows; at most 0 if it allows nothing."""
        return _largest_divergence(self.epsilon, self.delta, self.order)

    def spent(self, events: Sequence[DpEvent]) -> float:
        """Epsilon of all events together, at `delta`.

        The divergence is converted as by Canonne, Kamath and Steinke 2020, proposition 12 (Balle et al. 2020, theorem
        21).
        """
        divergence = rdp_at_order(events, self.order)
        if divergence == 0:
            return 0.0
        return max(0.0, divergence - _gain(self.delta, self.order))

    def admits(self, events: Sequence[DpEvent]) -> bool:
        """Whether all events together stay within the limit."""
        if not events:
            return True
        return rdp_at_order(events, self.order) <= max(0.0, self.budget) * (1 + TOLERANCE)


def best_order(epsilon: float, delta: float) -> int:
    """The order at which one Gaussian release may have the least noise to stay within (epsilon, delta).

    Its Renyi divergence of order a is a / (2 sigma^2), so this is where the largest divergence over a is greatest.
    """
    return max(range(2, LARGEST_ORDER + 1), key=lambda order: _largest_divergence(epsilon, delta, order) / order)


def _largest_divergence(epsilon: float, delta: float, order: int) -> float:
    return epsilon + _gain(delta, order)


def _gain(delta: float, order: int) -> float:
    """Renyi divergence minus the epsilon that follows from it."""
    return (math.log(delta) + math.log(order)) / (order - 1) - math.log1p(-1 / order)
