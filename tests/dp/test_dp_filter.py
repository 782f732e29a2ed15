"""The Renyi filter: its order and conversion against other libraries, and plans chosen after earlier results."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.stats import norm

from rapid.dp.accounting import rdp_at_order
from rapid.dp.calibration import solve_noise_multiplier
from rapid.dp.events import dp_sgd_event, gaussian_event
from rapid.dp.filter import LARGEST_ORDER, RenyiFilter, best_order

Array = NDArray[np.float64]
EPSILON, DELTA = 1.0, 1 / (60_000 * math.log(60_000))


@settings(max_examples=40, deadline=None)
@given(
    noise=st.floats(0.5, 50), rate=st.floats(1e-4, 1), steps=st.integers(1, 1000),
    order=st.integers(2, 300), single=st.floats(2, 100),
)  # fmt: skip
def test_divergences_are_those_of_another_library(
    noise: float, rate: float, steps: int, order: int, single: float
) -> None:
    """dp-accounting's against Opacus'; Renyi divergences of one order add up."""
    wanted = float(np.ravel(compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=[order]))[0])
    found = rdp_at_order([dp_sgd_event(noise, rate, steps), gaussian_event(single)], order)
    assert found == pytest.approx(wanted + order / (2 * single**2), rel=1e-6, abs=1e-9)


def test_nothing_and_no_noise() -> None:
    limit = RenyiFilter.of(1.0, 1e-5)
    assert limit.admits([])
    assert limit.spent([]) == rdp_at_order([], 2) == 0
    assert limit.spent([gaussian_event(0.0)]) == math.inf
    assert not limit.admits([gaussian_event(0.0)])


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1, 1e-5), (3, 1e-6), (10, 1e-5), (50, 1e-5), (1, 1e-10)])
def test_what_is_admitted_at_most_converts_to_the_limit(epsilon: float, delta: float) -> None:
    """By dp-accounting's conversion (Canonne, Kamath and Steinke 2020) at the same order, and at no better one."""
    limit = RenyiFilter.of(epsilon, delta)
    sigma = math.sqrt(limit.order / (2 * limit.budget))
    assert limit.admits([gaussian_event(sigma * (1 + 1e-6))])
    assert not limit.admits([gaussian_event(sigma * (1 - 1e-6))])
    assert limit.spent([gaussian_event(sigma)]) == pytest.approx(epsilon)
    assert compute_epsilon([limit.order], [limit.budget], delta)[0] == pytest.approx(epsilon)
    # for this mechanism no other order gives less
    orders = list(range(2, LARGEST_ORDER))
    best, at = compute_epsilon(orders, [order / (2 * sigma**2) for order in orders], delta)
    assert best == pytest.approx(epsilon, rel=1e-9)
    assert at == limit.order == best_order(epsilon, delta)


def test_the_order_stays_that_of_the_line() -> None:
    assert RenyiFilter.of(1.0, 1e-5, 7).order == 7
    assert RenyiFilter.of(1.0, 1e-5).budget > RenyiFilter.of(1.0, 1e-5, 7).budget


def test_a_limit_too_small_for_its_delta_allows_nothing() -> None:
    limit = RenyiFilter.of(1e-4, 1e-10)
    assert limit.budget < 0
    assert not limit.admits([gaussian_event(1e5)])


def gaussian_delta(sigma: float, epsilon: Array) -> Array:
    """Of the Gaussian mechanism (Balle and Wang 2018)."""
    return np.asarray(
        norm.cdf(1 / (2 * sigma) - epsilon * sigma) - np.exp(epsilon + norm.logcdf(-1 / (2 * sigma) - epsilon * sigma))
    )


def sampled_delta(sigma: float, rate: float, steps: int, epsilon: Array) -> Array:
    """Of subsampled steps, from below: dp-accounting's optimistic estimate."""
    losses = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=False
    ).self_compose(steps)
    grid = np.linspace(epsilon.min(), epsilon.max(), 400)
    return np.interp(epsilon, grid, losses.get_delta_for_epsilon(grid))


def adaptive_delta(first: float, plans: list[tuple[float, float, int]]) -> float:
    """Delta at EPSILON of a Gaussian release and then the worst of several plans, chosen by its result.

    For each result, the plan is taken whose delta at what the result left of epsilon is largest.
    """
    x = np.linspace(-14 * first, 1 + 14 * first, 100_001)
    mass = norm.pdf(x, 1, first)
    left = EPSILON - (2 * x - 1) / (2 * first**2)
    deltas = [
        gaussian_delta(sigma, left) if rate == 1 else sampled_delta(sigma, rate, steps, left)
        for sigma, rate, steps in plans
    ]
    return float(np.trapezoid(mass * np.maximum.reduce(deltas), x))


def filled(limit: RenyiFilter, first: float, rate: float, steps: int) -> float:
    """The least noise that the filter admits after the first release."""
    low, high = 0.3, 1e3
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        admitted = limit.admits([gaussian_event(first), dp_sgd_event(middle, rate, steps)])
        low, high = (low, middle) if admitted else (middle, high)
    return high


def test_a_plan_chosen_by_an_earlier_result_stays_within_delta() -> None:
    """Where numerical composition admits each plan, but not the choice among them."""
    first, limit = 6.0, RenyiFilter.of(EPSILON, DELTA)
    kinds = [(1.0, 1), (1e-3, 1)]
    composed = [
        (solve_noise_multiplier(
            lambda noise, rate=rate, steps=steps: dp_sgd_event(noise, rate, steps), EPSILON, DELTA,
            [gaussian_event(first)],
        ), rate, steps)
        for rate, steps in kinds
    ]  # fmt: skip
    assert adaptive_delta(first, composed) > 1.3 * DELTA
    filtered = [(filled(limit, first, rate, steps), rate, steps) for rate, steps in kinds]
    assert adaptive_delta(first, filtered) <= DELTA
