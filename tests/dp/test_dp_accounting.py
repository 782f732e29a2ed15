"""Accounting against published figures, closed forms, quadrature and an independent numerical accountant."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from dp_accounting import DpEvent, LaplaceDpEvent
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy import optimize, stats

from rapid.dp.accounting import (
    group_epsilon,
    pld_epsilon,
    prv_epsilon,
    rdp_at_order,
    rdp_epsilon,
)
from rapid.dp.events import compose, dp_sgd_event, gaussian_event
from rapid.errors import PrivacyRefused

# sample_rate, noise_multiplier, steps, delta, RDP, PLD; None: of no known PLD
VECTORS = [
    (1 / 15, 2.48779, 4500, 1e-5, 9.996, 9.292),
    (1 / 15, 18.28125, 4500, 1e-5, 0.991, 0.907),
    (1 / 15, 82.5, 4500, 1e-5, 0.1955, 0.1750),
    (1 / 80, 1.30371, 24000, 1e-6, 9.990, 9.368),
    (1 / 118, 2.0, 174000, 1e-5, 9.995, 9.307),
    (1 / 118, 14.0, 165000, 1e-5, 0.996, 0.912),
    (1 / 90, 4.0, 385000, 1e-6, 9.984, 9.381),
    (1 / 80, 8.82812, 24000, 1e-6, 0.9986, 0.926),
    (1 / 469, 1.0, 450000, 1e-5, 9.963, 9.272),
    (1 / 469, 5.0, 325000, 1e-5, 0.9935, 0.911),
    (1 / 30, 5.6, 98000, 1e-5, 9.946, 9.263),
    (4096 / 50000, 2.852, 4000, 1e-5, 9.992, 9.29),
    (0.32768, 2.599, 200, 1e-5, 10.00, None),
    (0.0683, 2.0, 732, 1e-5, 4.823, 4.436),
    (0.0205, 1.0, 1464, 1e-5, 5.369, 4.881),
    (0.0256, 0.8, 976, 1e-6, 10.30, 9.364),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "rdp", "pld"), VECTORS)
def test_published_vectors(rate: float, noise: float, steps: int, delta: float, rdp: float, pld: float | None) -> None:
    event = dp_sgd_event(noise, rate, steps)
    assert rdp_epsilon([event], delta) == pytest.approx(rdp, rel=5e-3)
    if pld is None:
        return
    # an upper bound on what PLD bounds too, within the 0.02 of the two numerical errors
    assert prv_epsilon([event], delta) == pytest.approx(pld, abs=0.02)
    began = time.process_time()
    assert pld_epsilon([event], delta) == pytest.approx(pld, rel=3e-3)
    assert time.process_time() - began < 3  # well under a second on an idle core


@pytest.mark.parametrize("epsilon", [prv_epsilon, rdp_epsilon, pld_epsilon])
def test_without_steps_nothing_is_spent_and_without_noise_everything(
    epsilon: Callable[[list[DpEvent], float], float],
) -> None:
    assert epsilon([], 1e-5) == epsilon([dp_sgd_event(1.0, 0.1, 0)], 1e-5) == 0
    assert epsilon([dp_sgd_event(0.0, 0.1, 1)], 1e-5) == epsilon([gaussian_event(0.0)], 1e-5) == math.inf
    with pytest.raises(ValueError, match="Laplace"):
        epsilon([LaplaceDpEvent(1.0)], 1e-5)


@pytest.mark.parametrize("noise", [0.2, 0.05, 0.035, 0.03, 0.026, 0.01, 1e-3, 1e-9, 1e-90])
def test_a_large_epsilon_is_not_understated(noise: float) -> None:
    """Against the exact figure of one Gaussian release (Balle and Wang 2018, theorem 8), in logarithms."""
    delta = 1e-5

    def log_ratio(epsilon: float) -> float:
        upper, lower = stats.norm.logcdf([0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise])
        return float(upper + np.log1p(-np.exp(min(0.0, epsilon + lower - upper))) - np.log(delta))

    about = 0.5 / noise**2
    exact = about
    if noise > 1e-6:  # with less, the second term is too small for float64
        exact = float(optimize.brentq(log_ratio, 0.9 * about, about + 6 / noise))
    assert exact <= prv_epsilon([gaussian_event(noise)], delta) <= 1.15 * exact
    assert pld_epsilon([gaussian_event(noise)], delta) >= 0.999 * exact


@pytest.mark.parametrize("accountant", [prv_epsilon, pld_epsilon])
@pytest.mark.parametrize(("noise", "steps"), [(0.5, 300_000), (1.0, 300_000), (4.0, 150_000), (1.0, 1000)])
def test_rounding_in_many_steps_is_part_of_a_small_delta(
    accountant: Callable[[list[DpEvent], float], float], noise: float, steps: int
) -> None:
    """Steps with all images are together one Gaussian release."""
    found, exact = accountant([dp_sgd_event(noise * math.sqrt(steps), 1.0, steps)], 1e-10), exact_gaussian(noise, 1e-10)
    assert exact <= found <= 1.15 * exact


@pytest.mark.parametrize("steps", [1, 1000, 30_000])
def test_many_steps_of_a_group_are_not_overstated(steps: int) -> None:
    found = group_epsilon([dp_sgd_event(2 * math.sqrt(steps), 1.0, steps)], 1e-6, 2)
    assert exact_gaussian(1.0, 1e-6) <= found <= 1.02 * exact_gaussian(1.0, 1e-6)


def test_an_image_that_is_hit_rarely_and_hard() -> None:
    """PRV's domain would take gigabytes."""
    for event, delta in ((dp_sgd_event(0.1, 1e-7, 10_000), 1e-6), (dp_sgd_event(0.1, 1e-6, 1000), 1e-6)):
        assert prv_epsilon([event], delta) >= 0.99 * pld_epsilon([event], delta)


@pytest.mark.parametrize("noise", [1e-150, 1e-300])
def test_noise_that_float64_cannot_square_is_none(noise: float) -> None:
    events = [dp_sgd_event(noise, 0.5, 3)]
    for epsilon in (prv_epsilon, rdp_epsilon, pld_epsilon):
        assert epsilon(events, 1e-5) == math.inf
    assert rdp_at_order(events, 3) == math.inf


def test_epsilon_rises_with_steps_and_rate_and_falls_with_noise() -> None:
    base = prv_epsilon([dp_sgd_event(1.5, 0.05, 200)], 1e-5)
    assert prv_epsilon([dp_sgd_event(1.5, 0.05, 400)], 1e-5) > base
    assert prv_epsilon([dp_sgd_event(1.5, 0.1, 200)], 1e-5) > base
    assert prv_epsilon([dp_sgd_event(2.5, 0.05, 200)], 1e-5) < base


@settings(max_examples=15, deadline=None)
@given(noise=st.floats(1, 50), rate=st.floats(1e-3, 0.2), steps=st.integers(1, 300), single=st.floats(2, 100))
def test_two_accountants_agree(noise: float, rate: float, steps: int, single: float) -> None:
    """Both are upper bounds: PRV is above PLD by no more than its stated numerical error."""
    events = [dp_sgd_event(noise, rate, steps), gaussian_event(single)]
    prv, pld = prv_epsilon(events, 1e-5), pld_epsilon(events, 1e-5)
    rough = rdp_epsilon(events, 1e-5)
    error = max(1e-3, min(0.01, rough / 50), rough / 1000)
    assert pld - 3e-3 * rough - 1e-3 <= prv <= pld + 2 * error + 1e-3
    assert prv <= rdp_epsilon(events, 1e-5, orders=range(2, 64)) + 1e-9
    assert prv_epsilon([compose(events)], 1e-5) == prv


def test_full_batches_are_the_gaussian_mechanism() -> None:
    """One step of rate 1: the analytic Gaussian mechanism (Balle and Wang 2018) in closed form."""
    noise, epsilon = 2.0, prv_epsilon([dp_sgd_event(2.0, 1.0, 1)], 1e-5)

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    a, b = 1 / (2 * noise), epsilon * noise
    delta = phi(a - b) - math.exp(epsilon) * phi(-a - b)
    assert delta <= 1e-5
    shorter = epsilon - 0.03
    assert phi(a - shorter * noise) - math.exp(shorter) * phi(-a - shorter * noise) > 1e-5


def test_prv_lies_above_another_librarys_privacy_loss_distribution() -> None:
    """dp-accounting's PLD, which is an upper bound too: both are within their numerical errors of the truth."""
    for noise, rate, steps in ((4.16, 0.034, 800), (1.0, 0.02, 500)):
        loss = privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=1e-4
        ).self_compose(steps)
        assert prv_epsilon([dp_sgd_event(noise, rate, steps)], 1e-5) == pytest.approx(
            loss.get_epsilon_for_delta(1e-5), abs=0.03
        )


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("noise", [3.0, 10.0])
def test_a_group_at_full_batches_is_one_gaussian_with_its_shift(size: int, noise: float) -> None:
    """Rate 1, one step: m images move the sum by m clip norms; analytic Gaussian (Balle and Wang 2018)."""
    delta, sigma = 1e-5, noise / size

    def spends(epsilon: float) -> float:
        return stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
            -0.5 / sigma - epsilon * sigma
        )

    exact = optimize.brentq(lambda epsilon: spends(epsilon) - delta, 0, 100)
    assert group_epsilon([dp_sgd_event(noise, 1.0, 1)], delta, size) == pytest.approx(exact, rel=0.01, abs=0.01)


@pytest.mark.parametrize(("noise", "rate", "size"), [(1.0, 0.1, 3), (2.0, 0.3, 2), (0.8, 0.01, 4)])
def test_a_group_in_one_step_by_integration(noise: float, rate: float, size: int) -> None:
    """The hockey-stick divergence of the mixture of Gaussians, by quadrature, in both directions."""
    delta = 1e-4
    shifts = np.arange(size + 1)
    weights = stats.binom.pmf(shifts, size, rate)
    x = np.linspace(-12 * noise, size + 12 * noise, 400_001)
    with_group = (weights[:, None] * stats.norm.pdf(x, shifts[:, None], noise)).sum(0)
    without = stats.norm.pdf(x, 0, noise)

    def spends(epsilon: float) -> float:
        factor = math.exp(epsilon)
        add, remove = np.maximum(with_group - factor * without, 0), np.maximum(without - factor * with_group, 0)
        return max(float(np.trapezoid(add, x)), float(np.trapezoid(remove, x)))

    exact = optimize.brentq(lambda epsilon: spends(epsilon) - delta, 1e-6, 60)
    found = group_epsilon([dp_sgd_event(noise, rate, 1)], delta, size)
    assert exact <= found * (1 + 1e-6) <= exact * 1.01 + 0.011


def test_groups_spend_more_than_one_and_less_than_the_textbook_says() -> None:
    one = group_epsilon([dp_sgd_event(4.0, 0.03, 500)], 1e-6, 1)
    assert one == prv_epsilon([dp_sgd_event(4.0, 0.03, 500)], 1e-6)
    two, three = (group_epsilon([dp_sgd_event(4.0, 0.03, 500)], 1e-6, size) for size in (2, 3))
    assert one < two < three
    # m epsilon holds only at a delta that is e^((m - 1) epsilon) times larger
    textbook = 2 * prv_epsilon([dp_sgd_event(4.0, 0.03, 500)], 1e-6 / (1 + math.exp(one)))
    assert two < textbook


@pytest.mark.parametrize("size", [1, 3])
def test_releases_compose(size: int) -> None:
    """Two Gaussian releases are one with the sum of their squared inverse noises; nothing is the neutral element."""
    both = [dp_sgd_event(4.0, 1.0, 1), dp_sgd_event(5.0, 1.0, 2)]
    noise = (1 / 16 + 2 / 25) ** -0.5
    one = group_epsilon([dp_sgd_event(noise, 1.0, 1)], 1e-5, size)
    assert group_epsilon(both, 1e-5, size) == pytest.approx(one, abs=0.02)
    assert group_epsilon([*both, dp_sgd_event(0.1, 1.0, 0)], 1e-5, size) == group_epsilon(both, 1e-5, size)
    assert prv_epsilon([], 1e-5) == rdp_epsilon([], 1e-5) == group_epsilon([], 1e-5, size) == 0


def test_large_groups_can_be_computed() -> None:
    events = [dp_sgd_event(50.0, 0.001, 10)]
    assert group_epsilon(events, 1e-6, 1100) > group_epsilon(events, 1e-6, 100)


def exact_gaussian(sigma: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism (Balle and Wang 2018) with 60 digits."""
    with mpmath.workdps(60):
        s = mpmath.mpf(sigma)

        def missing(epsilon: mpmath.mpf) -> mpmath.mpf:
            tail = mpmath.exp(epsilon) * mpmath.ncdf(-1 / (2 * s) - epsilon * s)
            return mpmath.ncdf(1 / (2 * s) - epsilon * s) - tail - mpmath.mpf(delta)

        low, high = mpmath.mpf(0), mpmath.mpf(64)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if missing(middle) > 0 else (low, middle)
        return float(high)


@pytest.mark.parametrize("sigma", [25.0, 5.0, 0.75])
@pytest.mark.parametrize("delta", [1e-5, 1e-10])
def test_many_full_batches_are_not_below_one_gaussian(sigma: float, delta: float) -> None:
    """n steps with sqrt(n) times the noise are one, in exact arithmetic, down to the least delta that is accepted."""
    exact = exact_gaussian(sigma, delta)
    for steps in (1, 50_000):
        found = prv_epsilon([dp_sgd_event(sigma * math.sqrt(steps), 1.0, steps)], delta)
        assert exact <= found <= exact * 1.02 + 0.02, steps


@pytest.mark.parametrize(("rate", "noise", "steps"), [(1 / 80, 1.30371, 24_000), (0.0683, 2.0, 7320)])
def test_many_subsampled_steps_are_not_below_an_optimistic_estimate(rate: float, noise: float, steps: int) -> None:
    """dp-accounting's privacy loss distribution, rounded down instead of up: a lower bound, at small deltas."""
    losses = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=False,
        log_mass_truncation_bound=-60,
    ).self_compose(steps)  # fmt: skip
    for delta in (1e-9, 1e-10):
        assert prv_epsilon([dp_sgd_event(noise, rate, steps)], delta) >= losses.get_epsilon_for_delta(delta)


def test_a_number_that_is_none_is_never_read_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library returns: max(0.0, nan) is 0.0."""
    event = dp_sgd_event(3.21, 0.0123, 17)
    for accountant in (RDPAccountant, PRVAccountant, PLDAccountant):
        monkeypatch.setattr(accountant, "get_epsilon", lambda *_, **__: math.nan)
    for epsilon in (prv_epsilon, rdp_epsilon, pld_epsilon):
        with pytest.raises(PrivacyRefused, match="gives no number"):
            epsilon([event], 1e-5)
    monkeypatch.setattr(RdpAccountant, "rdp", property(lambda self: np.array([math.nan])))
    with pytest.raises(PrivacyRefused, match="gives no number"):
        rdp_at_order([event], 17)
