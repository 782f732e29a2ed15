"""Results of the tests of a mechanism's steps, and the decision from all of them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite

from scipy.stats import norm

FALSE_ALARM = 1e-3
"""Probability that any test at all raises an alarm though the mechanism does what it claims."""
NOMINAL = 1e-5
"""Level at which `Finding.detects` is stated: about `FALSE_ALARM` over the number of tests."""


MAIN_TESTS = {"noise": "noise: scale", "sensitivity": "one example", "sample rate": "sampling: rate"}
"""Ends of the names of the tests whose sharpness is told, by what they look at."""


@dataclass(frozen=True)
class Finding:
    """Result of one test.

    Attributes:
        subject: what was audited, such as "late steps".
        test: the property of the claim that was tested, its null hypothesis.
        p_value: probability of a result as extreme as this one if the claim holds, or an upper bound on it; corrected
            for everything that was tried within the test.
        observed: the measured quantity, in units in which the claim says 1 where there is such a unit.
        detects: relative deviation that is found with 95 % power at level `NOMINAL`; None where there is no scale.
        where: the part with the smallest p-value, if the test has parts.
    """

    subject: str
    test: str
    p_value: float
    observed: float
    detects: float | None = None
    where: str = ""


@dataclass(frozen=True)
class StepAudit:
    """All findings. The claim is refuted where one of m p-values is below false_alarm / m (Bonferroni).

    Attributes:
        findings: of all subjects.
        false_alarm: for all tests together.
        seconds: duration.
    """

    findings: tuple[Finding, ...]
    seconds: float
    false_alarm: float = FALSE_ALARM

    @property
    def level(self) -> float:
        """Largest p-value that refutes the claim, exclusive."""
        return self.false_alarm / max(1, len(self.findings))

    @property
    def deviations(self) -> list[Finding]:
        """The findings that refute the claim; a p-value that is no number does."""
        return [finding for finding in self.findings if not finding.p_value >= self.level]

    @property
    def refuted(self) -> bool:
        """Whether the mechanism does not do what it claims."""
        return bool(self.deviations)

    @property
    def sharpness(self) -> dict[str, float]:
        """The largest relative deviation that any of the main tests would have missed, by what they look at."""
        found = {}
        for what, name in MAIN_TESTS.items():
            # single counts are few, and have the noise of the sums, of which there are many
            listed = [one.detects for one in self.findings if one.test.endswith(name) and one.subject != "counts"]
            # at sample rate 1 everyone is in every batch, and there is no rate to test
            if shares := [detects for detects in listed if detects]:
                found[what] = max(shares)
        return found


def certain(subject: str, test: str, holds: bool, observed: float = 0.0) -> Finding:
    """A finding about something that is not random: p-value 1 or 0."""
    return Finding(subject, test, float(holds), observed)


def smallest(
    subject: str, test: str, parts: Iterable[tuple[str, float, float]], detects: float | None = None
) -> Finding:
    """One finding from tests of several parts: the smallest p-value times their number (Bonferroni).

    Args:
        subject: see `Finding`.
        test: see `Finding`.
        parts: name, p-value and observed value of each part; at least one.
        detects: see `Finding`.
    """
    listed = list(parts)
    where, p_value, observed = min(listed, key=lambda part: part[1] if isfinite(part[1]) else -inf)
    return Finding(subject, test, min(1.0, p_value * len(listed)), observed, detects, where)


def deviations_needed(tests: float = 1) -> float:
    """Standard deviations by which a normal statistic must be off to be found with 95 % power at level `NOMINAL`.

    Args:
        tests: number of parts among which the level is split.
    """
    return float(norm.isf(NOMINAL / tests / 2) + norm.isf(0.05))
