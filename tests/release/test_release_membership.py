"""Attacks on canaries: intervals, what epsilon allows, and toys whose rates are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm

from rapid.errors import InputError
from rapid.evaluate.neighbours import nearest_images
from rapid.release.membership import (
    attacks,
    clopper_pearson,
    largest_advantage,
    largest_rate,
    membership_rules,
)
from rapid.release.policy import MembershipPolicy

POLICY = MembershipPolicy()
shares = st.floats(0, 1)


@settings(max_examples=40)
@given(st.integers(1, 400), st.floats(0, 1), st.floats(0.5, 0.9999))
def test_intervals_are_those_of_scipy(trials: int, share: float, confidence: float) -> None:
    hits = round(share * trials)
    expected = binomtest(hits, trials).proportion_ci(confidence, "exact")
    assert clopper_pearson(hits, trials, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


@settings(max_examples=60)
@given(st.floats(0.05, 8), st.floats(-3, 8), shares)
def test_no_test_of_the_gaussian_mechanism_exceeds_what_epsilon_allows(mu: float, epsilon: float, f: float) -> None:
    """The best test finds Phi(Phi^-1(f) + mu); delta(epsilon) is that of Balle and Wang 2018, theorem 8."""
    epsilon = abs(epsilon)
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    best = norm.cdf(norm.ppf(f) + mu)
    assert best <= largest_rate(f, epsilon, delta) + 1e-9
    # and where its likelihood ratio is e^epsilon, it reaches the bound
    tight = norm.sf(mu / 2 + epsilon / mu)
    assert largest_rate(tight, epsilon, delta) == pytest.approx(norm.cdf(norm.ppf(tight) + mu), abs=1e-7)


@settings(max_examples=40)
@given(st.floats(0, 50), st.floats(1e-10, 0.5))
def test_the_largest_advantage_is_that_of_the_best_rates(epsilon: float, delta: float) -> None:
    # the bound has a corner, which is in no grid
    corner = (1 - delta) / (1 + math.exp(epsilon))
    rates = [*np.linspace(0, 1, 1001).tolist(), corner]
    best = max(largest_rate(f, epsilon, delta) - f for f in rates)
    assert largest_advantage(epsilon, delta) == pytest.approx(best, abs=1e-9)


def test_extreme_epsilons() -> None:
    for epsilon in (700.0, 1e6, math.inf):
        assert largest_rate(1e-9, epsilon, 1e-6) == 1
        assert largest_advantage(epsilon, 1e-6) == 1
    assert largest_rate(0.25, 0.0, 0.0) == 0.25
    assert largest_advantage(0.0, 0.0) == 0


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_bounds_hold_the_rates_of_a_gaussian_toy(mu: float) -> None:
    rng = np.random.default_rng(round(mu))
    misses, rates = 0, []
    for _ in range(40):
        scores = {"likelihood": (rng.normal(mu, 1, 500), rng.normal(0, 1, 600))}
        for attack in attacks(scores, POLICY, 1.0, 1e-5):
            # the threshold that it chose is known only by the rates that it leads to
            low, high = attack.false_positive_rate[1:]
            best = [norm.cdf(norm.ppf(f) + mu) for f in (low, high)]
            misses += attack.true_positive_rate[2] < best[0] or attack.true_positive_rate[1] > best[1]
            assert (attack.members, attack.non_members) == (500, 300)
            rates.append((attack.wanted, attack.false_positive_rate[0]))
    assert misses <= 40 * 0.05
    for wanted in POLICY.false_positive_rates:
        found = [rate for one, rate in rates if one == wanted]
        # 40 times 300 guesses, at thresholds that vary
        assert np.mean(found) == pytest.approx(wanted, abs=0.2 * wanted + 0.003)


def test_all_bounds_hold_together() -> None:
    """Bonferroni: two intervals for each score and rate."""
    rng = np.random.default_rng(3)
    scores = {name: (rng.normal(0.3, 1, 200), rng.normal(size=200)) for name in ("a", "b")}
    rates = len(POLICY.false_positive_rates)
    confidence = 1 - (1 - POLICY.confidence) / (2 * 2 * rates)
    found = attacks(scores, POLICY, 1.0, 1e-5)
    assert len(found) == 2 * rates
    for one in found:
        guessed = (
            (one.true_positives, 200, one.true_positive_rate),
            (one.false_positives, 100, one.false_positive_rate),
        )
        for hits, count, measured in guessed:
            interval = binomtest(hits, count).proportion_ci(confidence_level=confidence, method="exact")
            assert measured[1:] == pytest.approx((interval.low, interval.high))


def test_an_honest_model_passes_and_more_canaries_tell_more() -> None:
    rng = np.random.default_rng(0)
    bounds = []
    for count in (50, 500, 5000):
        found = attacks({"noise": (rng.normal(size=count), rng.normal(size=count))}, POLICY, 1.0, 1e-5)
        within, small = membership_rules(POLICY, found, 1.0, 1e-5)
        assert within.outcome == "pass"
        bounds.append(max(one.advantage_at_most for one in found))
        assert small.outcome == ("pass" if bounds[-1] <= 0.1 else "fail")
    assert bounds[0] > bounds[1] > bounds[2]
    assert bounds[2] < 0.1 < bounds[0]


def test_a_toy_that_memorises_is_refuted() -> None:
    """It publishes its training images with a little noise, and claims epsilon 1 or 3."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (300, 6, 6)).astype(np.uint8)
    members, others = images[:150], images[150:]
    synthetic = np.clip(members + rng.normal(0, 5, members.shape), 0, 255).astype(np.uint8)
    scores = tuple(-nearest_images(some, synthetic).distances for some in (members, others))
    for epsilon in (1.0, 3.0):
        found = attacks({"distance": scores}, POLICY, epsilon, 1e-5)
        assert [one.true_positives for one in found] == [150, 150, 150]
        # the closed form of the bound at the upper end of the false positive rate
        first = found[0]
        upper = first.false_positive_rate[2]
        expected = min(math.exp(epsilon) * upper + 1e-5, 1 - math.exp(-epsilon) * (1 - 1e-5 - upper))
        assert first.allowed == pytest.approx(expected)
        assert first.true_positive_rate[1] > expected
        within, small = membership_rules(POLICY, found, epsilon, 1e-5)
        assert (within.outcome, small.outcome) == ("fail", "fail")
        assert "distance" in within.found
    # an epsilon that allows it is not refuted
    honest = attacks({"distance": scores}, POLICY, 20.0, 1e-5)
    assert not any(one.refutes for one in honest)


def test_what_was_not_measured_never_passes() -> None:
    for required in (True, False):
        policy = MembershipPolicy(required=required)
        for found in membership_rules(policy, "no canaries were given", 1.0, 1e-5):
            assert (found.outcome, found.stops) == ("not measured", required)


def test_few_canaries_are_refused_and_odd_scores_are_no_members() -> None:
    some = np.zeros(20)
    for field, pair in (("members", (some[:19], some)), ("non_members", (some, some[:19]))):
        with pytest.raises(InputError, match=field):
            attacks({"x": pair}, POLICY, 1.0, 1e-5)
    nan = np.full(40, np.nan)
    for attack in attacks({"x": (nan, np.zeros(40)), "y": (some, some)}, POLICY, 1.0, 1e-5):
        assert (attack.true_positives, attack.false_positives) == (0, 0)
