"""Confidence limits and power of the audit of a whole stage, against simulations and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rapid.dp.accounting import LARGEST_NUMERICAL, prv_epsilon
from rapid.dp.audit.evidence import Evidence, Limits, bound, bound_if, least_epsilon
from rapid.dp.events import dp_sgd_event
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release

CANARIES, STEPS, RATE, SIGMA, PLACES = 50, 12, 0.2, 1.5, 200
FAILURE = 0.1
TRIALS = 300


def drawn(
    rng: np.random.Generator, noise: float = 1.0, sensitivity: float = 1.0, rate: float = 1.0, reach: float = 1.0
) -> Evidence:
    """Canaries of orthogonal gradients of norm `reach`; the mechanism is off by the other factors."""
    spec = DpSgdSpec(name="net", dataset_size=CANARIES, expected_batch=round(RATE * CANARIES), steps=STEPS, clip_norm=1)
    evidence = Evidence(Release(spec=spec, noise_multiplier=SIGMA), [("all", PLACES)])
    coins = rng.random(CANARIES) < 0.5
    for _ in range(STEPS):
        present = rng.random(CANARIES) < rate * RATE
        there = present & coins
        left = noise * SIGMA * rng.standard_normal(PLACES)
        left[:CANARIES] += (sensitivity - 1) * reach * there
        count = int(there.sum())
        evidence.noise.append(torch.from_numpy(left / SIGMA).float())
        evidence.present.append(present)
        evidence.there.add(count, reach * count, reach * count, float(left[:CANARIES][there].sum()), count)
        others = CANARIES - count
        evidence.elsewhere.add(others, 0.0, 0.0, float(left[:CANARIES][~there].sum()), others)
    return evidence


@pytest.mark.parametrize(
    "truth",
    [{}, {"noise": 0.5, "sensitivity": 1.7, "rate": 0.6, "reach": 0.9}],
)
def test_the_limits_hold_as_often_as_they_say(truth: dict[str, float]) -> None:
    """Each limit is on the wrong side of the true number in at most `FAILURE` of the trials, and near to that often
    if the mechanism is what it claims; contributions that are too large count as noise, too."""
    rng = np.random.default_rng(0)
    limits = [drawn(rng, **truth).limits(FAILURE) for _ in range(TRIALS)]
    wrong = {
        "noise": np.mean([one.noise < truth.get("noise", 1) * SIGMA for one in limits]),
        "shift": np.mean([one.shift > truth.get("sensitivity", 1) * truth.get("reach", 1) for one in limits]),
        "rate": np.mean([one.rate > truth.get("rate", 1) * RATE for one in limits]),
    }
    spread = 4 * math.sqrt(FAILURE * (1 - FAILURE) / TRIALS)
    for name, share in wrong.items():
        assert share <= FAILURE + spread, name
        # the noise limit makes that of the shift a little wider, and counts are whole numbers
        assert share > 0.03 or truth, name


@pytest.mark.parametrize("factor", [1.0, 1.1, 2.0])
@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_gradients_may_point_the_same_way(factor: float, common: float) -> None:
    """Canaries whose gradients share a direction all show the same excess, not the sum of all of it."""
    rng, count, sigma = np.random.default_rng(5), 400, 5.0
    spec = QuerySpec(name="mean", kind="mean", dataset_size=count, sensitivity=2.0)
    rows = rng.standard_normal((count, PLACES))
    rows = common * rows[:1] + (1 - common) * rows
    rows = torch.from_numpy(2.0 * rows / np.linalg.norm(rows, axis=1, keepdims=True))
    wrong = []
    for _ in range(TRIALS):
        coins = rng.random(count) < 0.5
        total = factor * rows[torch.from_numpy(coins)].sum(0) + 2.0 * sigma * torch.from_numpy(
            rng.standard_normal(PLACES)
        )
        evidence = Evidence.of_mean(Release(spec=spec, noise_multiplier=sigma), rows, coins, total)
        wrong.append(evidence.limits(FAILURE).shift > factor)
    assert np.mean(wrong) <= FAILURE + 4 * math.sqrt(FAILURE * (1 - FAILURE) / TRIALS)


def test_few_coins_that_all_came_up_leave_the_rate_open() -> None:
    """Clopper-Pearson: the limit is the rate at which all of n coins come up with probability `FAILURE`."""
    spec = DpSgdSpec(name="net", dataset_size=20, expected_batch=19, steps=2, clip_norm=1)
    for claimed, limit in ((spec, FAILURE ** (1 / 40)), (spec.model_copy(update={"expected_batch": 20}), 1.0)):
        evidence = Evidence(Release(spec=claimed, noise_multiplier=SIGMA), [("all", 3)])
        for _ in range(2):
            evidence.noise.append(torch.randn(3))
            evidence.present.append(np.ones(20, bool))
        assert evidence.limits(FAILURE).rate == pytest.approx(limit)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_computed_power_is_that_of_simulations(factor: float) -> None:
    """With 95 % power each limit is better than what `limits_if` says; and it is not far from that."""
    rng = np.random.default_rng(1)
    missed = 0.05
    expected = drawn(rng).limits_if(factor, FAILURE, missed)
    limits = [drawn(rng, noise=factor).limits(FAILURE) for _ in range(TRIALS)]
    for name, shares in (
        ("noise", [one.noise <= expected.noise for one in limits]),
        ("shift", [one.shift >= expected.shift for one in limits]),
        ("rate", [one.rate >= expected.rate for one in limits]),
    ):
        assert 0.85 < np.mean(shares) < 0.995, name


def test_more_evidence_brings_the_bound_to_epsilon() -> None:
    """With sums as of a million canaries, the bound of the true mechanism is its epsilon, and that of half the noise
    is the epsilon of half the noise."""
    evidence = drawn(np.random.default_rng(2))
    spec, many = evidence.release.spec, 1e9
    for factor in (1.0, 0.5):
        epsilon = prv_epsilon([dp_sgd_event(factor * SIGMA, spec.sample_rate, STEPS)], 1e-5)
        found = bound_if([evidence], 1e-5, 0.95, factor, many)
        # the noise is measured by the numbers of noise, whose count stays
        assert 0.8 * epsilon < found < epsilon


def test_the_bound_is_below_the_claim_and_above_it_with_less_noise() -> None:
    rng = np.random.default_rng(3)
    claim = prv_epsilon([dp_sgd_event(SIGMA, RATE, STEPS)], 1e-5)
    true = [bound([drawn(rng)], 1e-5, 0.95) for _ in range(5)]
    assert max(true) < claim
    tenth = drawn(rng, noise=0.1)
    assert bound([tenth], 1e-5, 0.95) > 10 * claim
    assert bound([drawn(rng), tenth], 1e-5, 0.95) > 10 * claim


def test_a_training_that_shows_nothing_counts_as_none() -> None:
    nothing, something = Limits(1.0, -0.1, 0.2, 10), Limits(1.0, 0.8, 0.2, 10)
    assert nothing.noise_multiplier == math.inf
    assert least_epsilon([nothing], 1e-5) == 0
    alone = prv_epsilon([dp_sgd_event(1 / 0.8, 0.2, 10)], 1e-5)
    assert least_epsilon([something, nothing], 1e-5) == pytest.approx(alone)
    assert least_epsilon([], 1e-5) == 0
    # noise that is too small for the numerical accountant: what more noise would give
    for noise in (1e-6, 0.03, 0.3):
        assert 100 < least_epsilon([Limits(noise, 1.0, 1.0, 100)], 1e-5) <= LARGEST_NUMERICAL


def test_all_limits_of_all_releases_hold_together() -> None:
    """Bonferroni: three limits of each release."""
    evidence = [drawn(np.random.default_rng(number), noise=0.2) for number in range(2)]
    (first,) = evidence[:1]
    assert bound([first], 1e-5, 0.95) == least_epsilon([first.limits(0.05 / 3)], 1e-5)
    assert bound(evidence, 1e-5, 0.95) == least_epsilon([one.limits(0.05 / 6) for one in evidence], 1e-5)


def test_no_canary_in_any_batch() -> None:
    evidence = drawn(np.random.default_rng(4), rate=0.0)
    assert evidence.limits(FAILURE).noise_multiplier == math.inf
    assert "sensitivity: canaries that take part" not in {finding.test for finding in evidence.findings()}
    assert bound_if([evidence], 1e-5, 0.95, 0.5) == 0
