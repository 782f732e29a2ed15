"""The quick bound against both libraries, a closed form, and sums with many digits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.dp.accounting import rdp_epsilon
from rapid.dp.events import compose, dp_sgd_event
from rapid.dp.renyi_bound import LOW_ORDERS, ORDERS, epsilon_of, renyi_bound

steps = st.tuples(
    st.floats(-1, 5).map(lambda power: 10**power),
    st.one_of(st.just(1.0), st.floats(-6, -0.001).map(lambda power: 10**power)),
    st.integers(1, 100_000),
)


@settings(max_examples=40)
@given(history=st.lists(steps, min_size=1, max_size=3), delta=st.floats(1e-10, 0.1))
def test_it_is_the_libraries_bound(history: list[tuple[float, float, int]], delta: float) -> None:
    events = [dp_sgd_event(*row) for row in history]
    found = renyi_bound(history, delta)
    assert found == pytest.approx(rdp_epsilon(events, delta, orders=ORDERS), rel=1e-8, abs=1e-12)
    accountant = RdpAccountant(list(LOW_ORDERS))
    accountant.compose(compose(events))
    # that library's own epsilon is 0 for some large deltas, so its divergences are compared
    expected = epsilon_of(np.asarray(accountant.rdp), LOW_ORDERS, delta)
    assert renyi_bound(history, delta, LOW_ORDERS) == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert found <= renyi_bound(history, delta, LOW_ORDERS)


@pytest.mark.parametrize("order", [2, 63, 1024])
@pytest.mark.parametrize(("noise", "rate"), [(1e5, 1e-6), (1e5, 0.5), (20.0, 1e-3), (1.0, 0.3), (0.3, 0.9)])
def test_with_sixty_digits(order: int, noise: float, rate: float) -> None:
    """Many steps whose divergences are tiny: nothing is lost to rounding."""
    count, delta = 10**9, 1e-10
    with mpmath.workdps(60):
        q, variance = mpmath.mpf(rate), mpmath.mpf(noise) ** 2
        moment = mpmath.fsum(
            mpmath.binomial(order, k) * q**k * (1 - q) ** (order - k) * mpmath.exp((k * k - k) / (2 * variance))
            for k in range(order + 1)
        )
        divergence = count * mpmath.log(moment) / (order - 1)
        rest = mpmath.log1p(-mpmath.mpf(1) / order) - (mpmath.log(delta) + mpmath.log(order)) / (order - 1)
        expected = float(divergence + rest)
    assert renyi_bound([(noise, rate, count)], delta, (order,)) == pytest.approx(max(expected, 0.0), rel=1e-10)


def test_nothing_and_everything() -> None:
    assert renyi_bound([], 1e-5) == renyi_bound([(1.0, 0.0, 10)], 1e-5) == renyi_bound([(1.0, 0.5, 0)], 1e-5) == 0
    assert renyi_bound([(0.0, 0.5, 1)], 1e-5) == renyi_bound([(3.0, 0.5, 1), (1e-150, 0.5, 1)], 1e-5) == math.inf
