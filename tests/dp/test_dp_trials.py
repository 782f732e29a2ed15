"""A random number of trials: its distribution against scipy, its cost against the exact one and against formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.stats import geom, logser, nbinom

from rapid.dp.trials import BITS, Trials

Array = NDArray[np.float64]
ORDERS = np.array([1.25, 1.5, 2, 3, 5, 8, 16, 32, 64, 256, 1024])
means = st.floats(1.01, 300)
shapes = st.one_of(st.sampled_from([0.0, 5e-324, 0.5, 1.0, 2.0]), st.floats(0.01, 20))


def probabilities(trials: Trials, numbers: NDArray[np.int64]) -> Array:
    """P(K = k), by scipy's distributions."""
    if trials.shape < 1e-9:
        return np.asarray(logser.pmf(numbers, 1 - trials.gamma))
    if trials.shape == 1:
        return np.asarray(geom.pmf(numbers, trials.gamma))
    plain = nbinom(trials.shape, trials.gamma)
    return np.asarray(plain.pmf(numbers) / plain.sf(0))


def generating_function(trials: Trials, x: Array) -> Array:
    """E[x^K], in closed form (Papernot and Steinke 2022, remark after definition 1)."""
    base, gamma, shape = 1 - (1 - trials.gamma) * x, trials.gamma, trials.shape
    if shape < 1e-9:
        return np.asarray(np.log(base) / math.log(gamma))
    return np.asarray(np.expm1(-shape * np.log(base)) / math.expm1(-shape * math.log(gamma)))


@settings(max_examples=60, deadline=None)
@given(means, shapes)
def test_the_mean_is_what_was_asked_for_and_never_more(mean: float, shape: float) -> None:
    trials = Trials(mean=mean, shape=shape)
    numbers = np.arange(1, 40_000)
    found = float((probabilities(trials, numbers) * numbers).sum())
    assert found == pytest.approx(mean, rel=1e-6)
    assert 0 < trials.gamma < 1


@settings(max_examples=60, deadline=None)
@given(means, shapes, st.floats(1e-6, 1 - 1e-6))
# the first numbers have less than 2^-300
@example(1000.0, 100.0, 0.5)
@example(8000.0, 60.0, 0.95)
def test_numbers_are_drawn_by_the_distribution_function(mean: float, shape: float, level: float) -> None:
    trials = Trials(mean=mean, shape=shape)
    number = trials.number(int(level * 2**BITS))
    reached = probabilities(trials, np.arange(1, number + 1)).cumsum()
    assert reached[-1] >= level - 1e-9
    assert number == 1 or reached[-2] <= level + 1e-9
    assert trials.quantile(level) in (number, number - 1)


def test_every_bit_pattern_is_a_number() -> None:
    for shape in (0.0, 1.0, 3.0):
        trials = Trials(mean=10, shape=shape)
        assert trials.number(0) == 1
        assert 100 < trials.number(2**BITS - 1) < 10_000
        assert all(trials.draw() >= 1 for _ in range(20))
        assert trials.quantile(0.5) <= trials.quantile(0.95)


def renyi(first: Array, second: Array, orders: Array) -> Array:
    """Exact Renyi divergences of two distributions on the same points, the larger direction."""
    found = []
    for p, q in ((first, second), (second, first)):
        with np.errstate(divide="ignore"):
            terms = orders[:, None] * np.log(p) - (orders[:, None] - 1) * np.log(q)
        found.append(np.logaddexp.reduce(terms, axis=1) / (orders - 1))
    return np.asarray(np.maximum(*found))


def best(trials: Trials, trial: Array) -> Array:
    """Exact distribution of the best trial: its distribution function is E[F^K]."""
    below = np.concatenate([[0.0], trial.cumsum() / trial.sum()])
    return np.asarray(np.diff(generating_function(trials, below)))


rows = st.lists(st.floats(-6, 0), min_size=2, max_size=7)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.floats(1.05, 60), shapes)
def test_the_bound_holds_for_the_exact_best_of_finite_mechanisms(
    data: st.DataObject, mean: float, shape: float
) -> None:
    logs = data.draw(rows)
    change = data.draw(st.lists(st.floats(-1.5, 1.5), min_size=len(logs), max_size=len(logs)))
    first, second = np.exp(logs), np.exp(np.add(logs, change))
    first, second = first / first.sum(), second / second.sum()
    trials = Trials(mean=mean, shape=shape)
    bound = trials.divergences(ORDERS, renyi(first, second, ORDERS))
    exact = renyi(best(trials, first), best(trials, second), ORDERS)
    assert (exact <= bound * (1 + 1e-6) + 1e-6).all()


@pytest.mark.parametrize(("shape", "least"), [(0.0, 1.4), (1.0, 1.95), (2.0, 2.6)])
def test_the_cost_is_real(shape: float, least: float) -> None:
    """Randomised response of epsilon 0.5, repeated often: the best answer tells much more than one, but within the pure
    bound (2 + shape) epsilon of corollary 3.
    """
    epsilon, order = 0.5, np.array([1e4])
    answer = np.array([1.0, math.exp(epsilon)]) / (1 + math.exp(epsilon))
    trials = Trials(mean=2000, shape=shape)
    assert renyi(answer, answer[::-1], order)[0] == pytest.approx(epsilon, rel=1e-3)
    exact = renyi(best(trials, answer), best(trials, answer[::-1]), order)[0]
    assert least * epsilon < exact < (2 + shape) * epsilon
    bound = trials.divergences([1e9], [epsilon])[0]
    assert bound == pytest.approx((2 + shape) * epsilon, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 3), means, shapes)
def test_the_bound_is_theorem_2(rho: float, mean: float, shape: float) -> None:
    """Written down again, as two loops, for a Gaussian trial of zCDP rho; and dp-accounting's."""
    trials = Trials(mean=mean, shape=shape)
    found = trials.divergences(ORDERS, rho * ORDERS)
    gamma = trials.gamma
    for place in range(len(ORDERS)):
        candidates = [
            rho * higher
            + (1 + shape) * (1 - 1 / second) * rho * second
            + (1 + shape) * math.log(1 / gamma) / second
            + math.log(mean) / (higher - 1)
            for higher in ORDERS[place:]
            for second in ORDERS
        ]
        assert found[place] == pytest.approx(min(candidates), rel=1e-9)
    accountant = RdpAccountant(orders=list(ORDERS))
    accountant.compose(RepeatAndSelectDpEvent(GaussianDpEvent(math.sqrt(0.5 / rho)), mean, shape))
    assert found == pytest.approx(accountant.rdp, rel=1e-6)
    assert (found <= accountant.rdp * (1 + 1e-12)).all()


@pytest.mark.parametrize("rho", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("mean", [5.0, 10.0, 100.0])
def test_published_closed_form_for_concentrated_privacy(rho: float, shape: float, mean: float) -> None:
    """Corollary 4 of the paper, where all orders may be taken: reached by a fine grid, and never undercut."""
    trials = Trials(mean=mean, shape=shape)
    top = 1 + math.sqrt(math.log(mean) / rho)
    orders = np.sort(np.append(np.geomspace(1.01, 1e4, 40_000), [top]))
    wanted = (
        2 * math.sqrt(rho * math.log(mean))
        + 2 * (1 + shape) * math.sqrt(rho * math.log(1 / trials.gamma))
        - shape * rho
    )
    found = trials.divergences(orders, rho * orders)
    low = found[orders <= top]
    assert (low >= wanted * (1 - 1e-9)).all()
    assert low == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("bad", [{"mean": 1.0}, {"mean": math.inf}, {"mean": 10.0, "shape": -0.1}, {"mean": math.nan}])
def test_bad_distributions(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError) as refused:
        Trials.model_validate(bad)
    assert refused.value.errors()[0]["loc"] == (list(bad)[-1],)
