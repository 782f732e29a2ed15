"""The budget of one private stage: its releases with their noise, which together spend at most epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from dp_accounting import DpEvent
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rapid.data.units import ONE_IMAGE, ONE_PERSON
from rapid.dp.accounting import (
    agrees,
    group_epsilon,
    pld_epsilon,
    prv_epsilon,
    rdp_epsilon,
)
from rapid.dp.calibration import single_noise_multiplier, solve_noise_multiplier
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release, check_budget
from rapid.errors import InputError, PrivacyRefused
from rapid.rounding import as_typed, rounded_up

SOLVED_AGAIN = 1e-3
"""Relative tolerance for the epsilon of one budget on different machines."""


class Budget(BaseModel):
    """The releases of one private stage.

    Attributes:
        epsilon: the requested epsilon; `spent` is at most this.
        delta: of (epsilon, delta).
        dataset_size: N.
        group_size: images of one person, for whom epsilon is reported too.
        unit: of the guarantee; N counts it.
        releases: everything that may be released about the private images.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    dataset_size: int = Field(ge=1)
    group_size: int = Field(1, ge=1)
    unit: str = ONE_IMAGE
    releases: tuple[Release, ...]

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        names = [release.name for release in self.releases]
        if len(set(names)) < len(names):
            raise ValueError("two releases have the same name")
        if any(release.spec.dataset_size != self.dataset_size for release in self.releases):
            raise ValueError("all releases must have the dataset_size of the budget")
        return self

    def release(self, name: str) -> Release:
        """The release of this name.

        Raises:
            PrivacyRefused: the budget does not list it.
        """
        for release in self.releases:
            if release.name == name:
                return release
        raise PrivacyRefused(f"release '{name}' is not in the budget, which lists {', '.join(self.names) or 'none'}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all releases."""
        return tuple(release.name for release in self.releases)

    @property
    def main(self) -> Release:
        """The release that spends what the others leave."""
        return next(release for release in self.releases if release.spec.share is None)

    def events(self, steps: Mapping[str, int] | None = None) -> list[DpEvent]:
        """Events of all releases: with all their steps, or with those that `steps` gives by name (default 0)."""
        return [release.event(None if steps is None else steps.get(release.name, 0)) for release in self.releases]

    @cached_property
    def spent(self) -> float:
        """Epsilon of all releases together at `delta`, by PRV."""
        return prv_epsilon(self.events(), self.delta)

    @cached_property
    def spent_rdp(self) -> float:
        """The same by RDP, for comparison."""
        return rdp_epsilon(self.events(), self.delta)

    @cached_property
    def spent_pld(self) -> float:
        """The same by dp_accounting's PLD, an independent implementation, for comparison."""
        return pld_epsilon(self.events(), self.delta)

    @cached_property
    def spent_group(self) -> float:
        """Epsilon for adding or removing the `group_size` images of one person."""
        return group_epsilon(self.events(), self.delta, self.group_size)

    def check(self) -> None:
        """Compare two accountants before anything is spent.

        Raises:
            PrivacyRefused: they disagree, or one of them gives no number.
        """
        first = self.spent
        if not math.isfinite(first):
            raise PrivacyRefused("epsilon is not finite: a release has no noise; nothing was spent")
        second = self.spent_pld
        if not agrees(first, second):
            raise PrivacyRefused(
                f"two accountants disagree (PRV: epsilon {rounded_up(first, 6)}, PLD: {rounded_up(second, 6)}, at "
                f"delta {as_typed(self.delta)}); nothing was spent. Report these numbers, and use another --delta or "
                "fewer steps"
            )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], epsilon: float, delta: float) -> Self:
        """The budget recorded by an earlier run; calibrating again may change the last digit.

        Args:
            record: made by `model_dump`, and read from JSON.
            epsilon: requested for the run.
            delta: requested for the run.

        Raises:
            InputError: the record was altered: it is inconsistent, or would spend more; or epsilon or delta are out of
                range.
        """
        altered = InputError("resume", "checkpoints/manifest.json was altered; restore it, or begin in a new folder")
        try:
            budget = cls.model_validate(record)
        except ValidationError:
            raise altered from None
        if [release.spec.share for release in budget.releases].count(None) != 1:
            raise altered
        check_budget(epsilon, delta, budget.dataset_size)
        if (budget.epsilon, budget.delta) != (epsilon, delta) or budget.spent > epsilon * (1 + SOLVED_AGAIN):
            raise altered
        return budget


def calibrate(
    specs: Sequence[DpSgdSpec | QuerySpec],
    *,
    epsilon: float,
    delta: float,
    group_size: int = 1,
    unit: str = ONE_IMAGE,
) -> Budget:
    """Find the least noise with which all releases together spend at most `epsilon` at `delta`, for one unit.

    Each release with a share gets the noise with which it alone would spend its share of epsilon; the one without a
    share gets what is left, by numerical composition with the others.

    Args:
        specs: of one data set; exactly one has no share.
        epsilon: of all together.
        delta: in (0, 1).
        group_size: images of one person, for whom epsilon is reported too; 1 if the unit is a person.
        unit: of the guarantee.

    Raises:
        InputError: an argument out of range.
        PrivacyRefused: two accountants disagree.
        ValueError: not exactly one spec without a share.
    """
    rest = [spec for spec in specs if spec.share is None]
    if len(rest) != 1:
        raise ValueError(f"exactly one release must have no share of epsilon, not {len(rest)}")
    size = rest[0].dataset_size
    check_budget(epsilon, delta, size)
    if group_size > 1 and unit == ONE_PERSON:
        problem = "is for guarantees of single images, and here the unit is a person already; leave it at 1"
        raise InputError("private.group_size", problem, group_size)
    if group_size > 1 and any(isinstance(spec, DpSgdSpec) and spec.band > 1 for spec in specs):
        problem = "cannot be told with private.noise_band above 1; make the unit a person, or leave one of them at 1"
        raise InputError("private.group_size", problem, group_size)
    if group_size > size:
        raise InputError("private.group_size", f"is larger than the private set of {size} images", group_size)
    noise = {spec.name: _alone(spec, epsilon * spec.share, delta) for spec in specs if spec.share is not None}
    others = [spec.event(noise[spec.name]) for spec in specs if spec.share is not None]
    noise[rest[0].name] = max(
        rest[0].least_noise_multiplier, solve_noise_multiplier(rest[0].event, epsilon, delta, others)
    )
    releases = tuple(Release(spec=spec, noise_multiplier=noise[spec.name]) for spec in specs)
    budget = Budget(
        epsilon=epsilon, delta=delta, dataset_size=size, group_size=group_size, unit=unit, releases=releases
    )
    budget.check()
    return budget


def _alone(spec: DpSgdSpec | QuerySpec, epsilon: float, delta: float) -> float:
    """The noise multiplier with which a release alone spends `epsilon`, or the least that it asks for."""
    solved = (
        single_noise_multiplier(epsilon, delta)
        if isinstance(spec, QuerySpec)
        else solve_noise_multiplier(spec.event, epsilon, delta)
    )
    return max(spec.least_noise_multiplier, solved)
