"""Private choice among settings: the budgets of all candidates, which one charge covers.

A trial draws a candidate uniformly at random, trains it, and scores it by one noisy count. Of a random number of trials
only the best is released. The trial is one mechanism, whatever it draws: its Renyi divergence is at most the largest of
the candidates' (the draw does not depend on the images), and `rapid.dp.trials` bounds that of the best trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from dp_accounting import DpEvent
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rapid.data.units import ONE_IMAGE
from rapid.dp.accounting import agrees
from rapid.dp.budget import SOLVED_AGAIN, Budget, calibrate
from rapid.dp.events import OneOfDpEvent, compose
from rapid.dp.releases import DpSgdSpec, QuerySpec, check_budget
from rapid.dp.renyi import library_epsilon, renyi_epsilon
from rapid.dp.trials import Trials
from rapid.errors import InputError, PrivacyRefused
from rapid.rounding import as_typed, rounded_up

TUNE = "tune"
"""Name of all trials together in the ledger."""
SCORE = "tuning-score"
"""Name of the release by which trials are compared."""
CLOSE = 0.99
"""Share of the requested epsilon that is spent at least."""
TRIES = 12
Specs = Sequence[DpSgdSpec | QuerySpec]


class Candidate(BaseModel):
    """One set of settings to choose from.

    Attributes:
        name: unique.
        budget: of one trial with it, including its score.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    budget: Budget

    @property
    def event(self) -> DpEvent:
        """All releases of one trial."""
        return compose(self.budget.events())


class Selection(BaseModel):
    """A private choice: everything that is charged, before anything is trained.

    Attributes:
        epsilon: the requested epsilon; `spent` is at most this.
        delta: of (epsilon, delta).
        trials: distribution of their number.
        candidates: at least one; all with the same number of units N, delta and unit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    trials: Trials
    candidates: tuple[Candidate, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        budgets = [candidate.budget for candidate in self.candidates]
        if len({candidate.name for candidate in self.candidates}) < len(budgets):
            raise ValueError("two candidates have the same name")
        if len({(budget.dataset_size, budget.delta, budget.unit, budget.group_size) for budget in budgets}) > 1:
            raise ValueError("the candidates are for different data sets")
        if any(SCORE not in budget.names for budget in budgets):
            raise ValueError("a candidate has no score")
        return self

    @property
    def trial_event(self) -> DpEvent:
        """One trial, whatever it draws."""
        events: list[DpEvent] = []
        for candidate in self.candidates:
            if candidate.event not in events:
                events.append(candidate.event)
        return OneOfDpEvent(tuple(events)) if len(events) > 1 else events[0]

    @property
    def event(self) -> DpEvent:
        """All trials together."""
        return self.trials.event(self.trial_event)

    @cached_property
    def spent(self) -> float:
        """Epsilon of all trials together at `delta`, by Renyi divergences."""
        return renyi_epsilon([self.event], self.delta)

    @property
    def trial_epsilon(self) -> float:
        """Epsilon of one trial, by PRV: what a run by itself would have spent to be as good."""
        return max(candidate.budget.spent for candidate in self.candidates)

    def check(self) -> None:
        """Compare with a second accountant (dp-accounting's) before anything is spent.

        It knows no choice among candidates, so it gets each alone, and may find less but not more.

        Raises:
            PrivacyRefused: it finds more, or no number.
        """
        found = library_epsilon(self.event, self.delta)
        if not agrees(self.spent, found):
            raise PrivacyRefused(
                f"two accountants disagree (epsilon {rounded_up(self.spent, 6)} and {rounded_up(found, 6)}, at "
                f"delta {as_typed(self.delta)}); nothing was spent. Report these numbers, and use another --delta"
            )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], epsilon: float, delta: float) -> Self:
        """The selection recorded by an earlier run; calibrating again may change the last digit.

        Args:
            record: made by `model_dump`, and read from JSON.
            epsilon: requested for the run.
            delta: requested for the run.

        Raises:
            InputError: the record was altered: it is inconsistent, or would spend more.
        """
        altered = InputError("resume", "checkpoints/manifest.json was altered; restore it, or begin in a new folder")
        try:
            found = cls.model_validate(record)
        except ValidationError:
            raise altered from None
        if (found.epsilon, found.delta) != (epsilon, delta) or found.spent > epsilon * (1 + SOLVED_AGAIN):
            raise altered
        return found


def score_spec(dataset_size: int, share: float) -> QuerySpec:
    """The release by which trials are compared.

    Args:
        dataset_size: N.
        share: of a trial's epsilon that it would spend by itself, in (0, 1).

    Raises:
        InputError: the share is out of range.
    """
    if not 0 < share < 1:
        raise InputError("score_share", "must lie in (0, 1), such as 0.1", share)
    # one bin: people have one vote, which their images share
    title = "private images that a classifier of synthetic images labels rightly"
    return QuerySpec(name=SCORE, title=title, share=share, kind="histogram", dataset_size=dataset_size)


def calibrate_selection(
    specs: Mapping[str, Specs],
    *,
    epsilon: float,
    delta: float,
    trials: Trials,
    unit: str = ONE_IMAGE,
) -> Selection:
    """Find budgets of the candidates with which the whole choice spends at most `epsilon` at `delta`, for one unit.

    All candidates get the same epsilon for a trial; the largest with which the whole stays within `epsilon`, to 1 %.

    Args:
        specs: the releases of each candidate by its name, including its score.
        epsilon: of everything together.
        delta: in (0, 1).
        trials: distribution of their number.
        unit: of the guarantee.

    Raises:
        InputError: an argument out of range, or no noise is enough.
        PrivacyRefused: two accountants disagree.
    """
    first, size = next(iter(specs)), next(iter(specs.values()))[0].dataset_size
    check_budget(epsilon, delta, size)

    def plan(trial_epsilon: float, names: Sequence[str]) -> Selection:
        budgets = {name: calibrate(specs[name], epsilon=trial_epsilon, delta=delta, unit=unit) for name in names}
        candidates = tuple(Candidate(name=name, budget=budget) for name, budget in budgets.items())
        return Selection(epsilon=epsilon, delta=delta, trials=trials, candidates=candidates)

    # the whole depends on a trial's epsilon nearly in the same way for all candidates: search with the first one
    level = epsilon / 2
    for names in ([first], list(specs)):
        for _ in range(TRIES):
            found = plan(level, names)
            if CLOSE * epsilon <= found.spent <= epsilon:
                break
            # nearly proportional, so that this converges quickly
            level *= (1 + CLOSE) / 2 * epsilon / found.spent
        else:
            raise InputError("epsilon", "no noise is found for all trials; use another, or other candidates", epsilon)
    found.check()
    return found
