"""The rules of a policy and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["pass", "fail", "not measured"]


@dataclass(frozen=True)
class Rule:
    """One demand of the policy.

    Attributes:
        name: short and fixed, for machines and for the line that names the failed rules.
        demand: what the policy demands, in words.
        found: what was found, in words; nothing from private images but what was released with noise.
        outcome: whether it holds.
        required: whether it must be measured.
    """

    name: str
    demand: str
    found: str
    outcome: Outcome
    required: bool = True

    @property
    def stops(self) -> bool:
        """Whether the release is refused for it: it does not hold, or it was required and not measured."""
        return self.outcome == "fail" or (self.required and self.outcome == "not measured")

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"stops": self.stops}


def rule(name: str, demand: str, found: str, holds: bool | None, *, required: bool = True) -> Rule:
    """A rule; `holds` is None if it was not measured."""
    outcome: Outcome = "not measured" if holds is None else "pass" if holds else "fail"
    return Rule(name, demand, found, outcome, required)


def stopping(rules: Iterable[Rule]) -> list[Rule]:
    """The rules for which the release is refused."""
    return [one for one in rules if one.stops]
