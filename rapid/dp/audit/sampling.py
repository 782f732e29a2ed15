"""Tests of the batches: each example is in each with the claimed probability, independently."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from rapid.dp.audit.bench import Bench, Build, own_rows
from rapid.dp.audit.findings import Finding, certain, deviations_needed, smallest
from rapid.ranks import Ranks

CANARIES = 200
QUIET = 0.01
DETECTED = 0.04
"""Relative deviation of the rate that the number of steps is chosen for."""
MOST_STEPS = 2000


def sampling_findings(sample_rate: float, build: Build, ranks: Ranks | None = None) -> list[Finding]:
    """Read from the sums who is in which batch, and test that these are independent coins of the claimed rate q.

    Canaries have orthogonal gradients, and there is next to no noise. All tests are exact binomial tests:

    | test               | counted                                                                 | chance       |
    |--------------------|-------------------------------------------------------------------------|--------------|
    | rate               | canaries in batches, over all steps                                     | q            |
    | rate of each       | the same for each canary (Bonferroni)                                   | q            |
    | consecutive steps  | canaries that are in both of two steps, disjoint pairs                  | q^2          |
    | neighbours         | pairs of neighbouring canaries that are in a batch together             | q^2          |
    | batch sizes        | steps whose batch is within the middle half of the binomial             | its mass     |

    The sampler does not depend on the network, so a table with one row a canary serves.

    Args:
        sample_rate: q, rounded to a whole expected batch.
        build: makes the mechanism.
        ranks: the processes that share the work.
    """
    subject = own_rows(CANARIES)
    batch = max(1, round(sample_rate * CANARIES))
    rate = batch / CANARIES
    wanted = (deviations_needed() / DETECTED) ** 2 * (1 - rate) / rate / CANARIES
    steps = max(20, min(MOST_STEPS, math.ceil(wanted)))
    bench = Bench(subject, build, steps=steps, noise_multiplier=QUIET, expected_batch=batch, ranks=ranks)
    # each canary's row has norm 1 in the direction (1, 1)
    along = np.stack([bench.step().view(CANARIES, 2).sum(1).numpy() / math.sqrt(2) for _ in range(steps)])
    present = along > 0.5
    clear = float(np.abs(along - present).max())
    found = [certain(subject.name, "sampling: every sum is one of whole examples", clear < 20 * QUIET, clear)]
    if rate == 1:
        return [*found, certain(subject.name, "sampling: everyone is in every batch", bool(present.all()))]
    return found + batch_findings(subject.name, present, rate)


def batch_findings(subject: str, present: NDArray[np.bool_], rate: float) -> list[Finding]:
    """The tests of `sampling_findings`.

    Args:
        subject: for the findings.
        present: who is in which batch, (steps, canaries).
        rate: q < 1.
    """
    steps, canaries = present.shape
    coins = present.size
    spread = deviations_needed() * math.sqrt((1 - rate) / (rate * coins))
    by_canary = [(f"canary {i}", *_binomial(int(own.sum()), steps, rate)) for i, own in enumerate(present.T)]
    twice = present[: steps // 2 * 2 : 2] & present[1::2]
    together = present[:, : canaries // 2 * 2 : 2] & present[:, 1::2]
    sizes = present.sum(1)
    low, high = (int(binom.ppf(share, canaries, rate)) for share in (0.25, 0.75))
    mass = float(binom.cdf(high, canaries, rate) - binom.cdf(low - 1, canaries, rate))
    middle = int(((sizes >= low) & (sizes <= high)).sum())
    return [
        Finding(subject, "sampling: rate", *_binomial(int(present.sum()), coins, rate), spread),
        smallest(subject, "sampling: rate of each example", by_canary),
        Finding(subject, "sampling: consecutive steps", *_binomial(int(twice.sum()), twice.size, rate**2)),
        Finding(subject, "sampling: neighbouring examples", *_binomial(int(together.sum()), together.size, rate**2)),
        Finding(subject, "sampling: batch sizes", *_binomial(middle, steps, mass)),
    ]


def _binomial(count: int, trials: int, chance: float) -> tuple[float, float]:
    """Two-sided p-value, and the observed rate relative to the claimed one."""
    p_value = 2 * min(float(binom.cdf(count, trials, chance)), float(binom.sf(count - 1, trials, chance)))
    return min(1.0, p_value), count / (trials * chance)
