"""Epsilon so far, as the progress of a private training shows it."""

from __future__ import annotations

import time

from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget
from rapid.dp.releases import Release
from rapid.errors import RapidError
from rapid.rounding import rounded_up

UPDATES = 20
"""How often epsilon is computed in a training, at most."""
SHARE = 0.05
"""Of the time of a training, about, that this may take: numerical composition takes up to a second."""


class EpsilonSoFar:
    """What has been spent while a release is made, for the progress alone: `privacy.json` has an account of its own.

    It is told after the first twentieth of a training, at its end, and between them as often as there is time for it.

    Args:
        budget: all releases, in their order.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._next = 0.0

    def note(self, release: Release, steps: int) -> str | None:
        """The words to show after a step, such as "epsilon 0.83"; None: what was shown last still stands.

        Args:
            release: of the budget; those before it were made, those after it were not.
            steps: of it that were taken.
        """
        last = release.spec.steps
        began = time.monotonic()
        if steps < last and (steps % max(1, last // UPDATES) or began < self._next):
            return None
        told = self._epsilon(release, steps)
        ended = time.monotonic()
        self._next = ended + (ended - began) / SHARE
        return told

    def _epsilon(self, release: Release, steps: int) -> str:
        budget = self._budget
        made = budget.releases[: budget.names.index(release.name)]
        done = {other.name: other.spec.steps for other in made} | {release.name: steps}
        try:
            epsilon = prv_epsilon(budget.events(done), budget.delta)
        except RapidError:
            # the plan was checked before the first step; for a part of it, no figure is better than a wrong one
            return "epsilon unknown"
        return f"epsilon {rounded_up(epsilon)}"
