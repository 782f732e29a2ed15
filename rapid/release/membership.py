"""Membership inference: how well an attacker tells images of the private set from others of the same kind.

The tester owns canaries, some of which were put into the private set. An attack gives each image a score, and calls
those above a threshold members. (epsilon, delta) bounds its rates: a true positive rate t and a false positive rate f
fulfil t <= e^epsilon f + delta and 1 - f <= e^epsilon (1 - t) + delta (Kairouz, Oh, Viswanath 2015, theorem 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from rapid.errors import InputError
from rapid.release.policy import MembershipPolicy
from rapid.release.rules import Rule, rule
from rapid.rounding import rounded_up

LEAST = 20
"""Canaries of each kind: half of the non-members sets the thresholds."""
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Attack:
    """One attack at one threshold.

    Attributes:
        score: what it looks at.
        wanted: the false positive rate for which the threshold was set.
        members: number of members that were guessed about.
        non_members: number of other images that were guessed about.
        true_positives: members called members.
        false_positives: others called members.
        true_positive_rate: estimate, lower and upper bound (Clopper-Pearson).
        false_positive_rate: the same.
        allowed: the largest true positive rate that (epsilon, delta) allows at the upper bound of the other rate.
    """

    score: str
    wanted: float
    members: int
    non_members: int
    true_positives: int
    false_positives: int
    true_positive_rate: tuple[float, float, float]
    false_positive_rate: tuple[float, float, float]
    allowed: float

    @property
    def advantage(self) -> float:
        """Estimated true minus false positive rate."""
        return self.true_positive_rate[0] - self.false_positive_rate[0]

    @property
    def advantage_at_most(self) -> float:
        """Upper bound on the advantage."""
        return self.true_positive_rate[2] - self.false_positive_rate[1]

    @property
    def refutes(self) -> bool:
        """Whether the attack is better than the claimed epsilon allows, with confidence."""
        return self.true_positive_rate[1] > self.allowed

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {
            "advantage": self.advantage,
            "advantage_at_most": self.advantage_at_most,
            "refutes": self.refutes,
        }


def largest_rate(false_positive_rate: float, epsilon: float, delta: float) -> float:
    """The largest true positive rate that (epsilon, delta)-DP allows."""
    # e^-epsilon, because e^epsilon may overflow
    shrink = math.exp(-epsilon)
    first = 1.0 if shrink == 0 else false_positive_rate / shrink + delta
    return min(1.0, max(0.0, first), 1 - shrink * max(0.0, 1 - delta - false_positive_rate))


def largest_advantage(epsilon: float, delta: float) -> float:
    """The largest true minus false positive rate that (epsilon, delta)-DP allows; tanh(epsilon / 2) for delta 0."""
    return math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(epsilon)) if epsilon < 700 else 1.0


def clopper_pearson(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """Exact two-sided interval for a binomial rate (Clopper and Pearson 1934)."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(beta.isf(tail, hits + 1, trials - hits))
    return low, high


def attacks(
    scores: Mapping[str, tuple[Scores, Scores]], policy: MembershipPolicy, epsilon: float, delta: float
) -> list[Attack]:
    """Attack with each score at each false positive rate of the policy; all bounds hold together.

    Half of the non-members, chosen at random, set the thresholds; the rates are measured on the other half and on all
    members.

    Args:
        scores: of members and of non-members, float64 (m,) and (n,), by the name of the score; higher ones speak for
            membership. NaN counts as the lowest.
        policy: rates and confidence.
        epsilon: of the claim.
        delta: of the claim.

    Raises:
        InputError: too few canaries.
    """
    found = []
    # two intervals for each attack
    intervals = 2 * len(scores) * len(policy.false_positive_rates)
    confidence = 1 - (1 - policy.confidence) / max(1, intervals)
    for name, (members, others) in scores.items():
        check_number("members", len(members))
        check_number("non_members", len(others))
        order = np.random.default_rng(0).permutation(len(others))
        lowest = [np.nan_to_num(some.astype(np.float64), nan=-np.inf) for some in (members, others[order])]
        inside, (setting, outside) = lowest[0], np.array_split(lowest[1], 2)
        for rate in policy.false_positive_rates:
            threshold = _threshold(setting, rate)
            hits, alarms = int((inside > threshold).sum()), int((outside > threshold).sum())
            true = (hits / len(inside), *clopper_pearson(hits, len(inside), confidence))
            false = (alarms / len(outside), *clopper_pearson(alarms, len(outside), confidence))
            allowed = largest_rate(false[2], epsilon, delta)
            found.append(Attack(name, rate, len(inside), len(outside), hits, alarms, true, false, allowed))
    return found


def check_number(field: str, count: int) -> None:
    """Refuse too few canaries.

    Raises:
        InputError: fewer than `LEAST`.
    """
    if count < LEAST:
        raise InputError(field, f"{count} images; give at least {LEAST}, better 1,000")


def membership_rules(
    policy: MembershipPolicy, found: Sequence[Attack] | str, epsilon: float, delta: float
) -> list[Rule]:
    """Whether attacks stay within what epsilon allows, and within the policy's advantage.

    Args:
        policy: the largest advantage.
        found: at least one; text says why there is none.
        epsilon: of the claim.
        delta: of the claim.
    """
    within = f"no attack on canaries is better than epsilon {rounded_up(epsilon)} allows"
    least = f"with {policy.confidence:.0%} confidence"
    small = f"no attack has an advantage over guessing above {policy.max_advantage:g}, {least}"
    if isinstance(found, str):
        return [
            rule("membership", within, found, None, required=policy.required),
            rule("membership-advantage", small, found, None, required=policy.required),
        ]
    refuting = [attack for attack in found if attack.refutes]
    largest = max(found, key=lambda attack: attack.advantage_at_most)
    words = (
        "none is" if not refuting else f"'{refuting[0].score}' finds at least {_percent(refuting[0])} of the members"
    )
    at_most = (
        f"at most {rounded_up(largest.advantage_at_most)} ('{largest.score}', {largest.members:,} members); "
        f"epsilon and delta alone allow {rounded_up(largest_advantage(epsilon, delta))}"
    )
    holds = largest.advantage_at_most <= policy.max_advantage
    return [
        rule("membership", within, words, not refuting, required=policy.required),
        rule("membership-advantage", small, at_most, holds, required=policy.required),
    ]


def _threshold(scores: Scores, rate: float) -> float:
    """A score that another non-member exceeds with probability `rate` at most, or 1 / (n + 1) if that is more."""
    above = max(0, math.floor(rate * (len(scores) + 1)) - 1)
    return float(np.sort(scores)[len(scores) - above - 1])


def _percent(attack: Attack) -> str:
    allowed = f"where {attack.allowed:.1%} is allowed"
    return f"{attack.true_positive_rate[1]:.1%} {allowed}"
