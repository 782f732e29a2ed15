"""The search for the noise that an epsilon needs, against closed forms, bisection and other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from dp_accounting import DpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rapid.dp.accounting import composition, pld_epsilon, prv_epsilon, rdp_epsilon
from rapid.dp.calibration import (
    MAX_NOISE_MULTIPLIER,
    MIN_NOISE_MULTIPLIER,
    rough_noise_multiplier,
    single_noise_multiplier,
    solve_noise_multiplier,
)
from rapid.dp.events import dp_sgd_event, gaussian_event
from rapid.errors import InputError


def steps_of(sample_rate: float, steps: int) -> Callable[[float], DpEvent]:
    return lambda noise_multiplier: dp_sgd_event(noise_multiplier, sample_rate, steps)


# epsilon, delta, sample_rate, steps, least noise multiplier (found by bisection)
SOLVED = [
    (1.0, 1e-6, 1024 / 60000, 150, 1.27865),
    (0.2, 1e-5, 0.05, 300, 14.3575),
    (10.0, 1e-5, 0.05, 300, 0.776229),
    (50.0, 1e-5, 0.1, 1000, 0.724344),
    (1.0, 1e-3, 1.0, 1, 2.59761),
    (0.01, 1e-6, 0.02, 150, 76.1053),
]


@pytest.mark.parametrize(("epsilon", "delta", "rate", "steps", "noise"), SOLVED)
def test_the_solved_noise_spends_the_budget_and_not_more(
    epsilon: float, delta: float, rate: float, steps: int, noise: float
) -> None:
    found = solve_noise_multiplier(steps_of(rate, steps), epsilon, delta)
    assert found == pytest.approx(noise, rel=1e-3)
    assert prv_epsilon([dp_sgd_event(found, rate, steps)], delta) <= epsilon
    assert prv_epsilon([dp_sgd_event(found * 0.998, rate, steps)], delta) > epsilon


@pytest.mark.parametrize(("epsilon", "delta", "rate", "steps", "noise"), SOLVED)
def test_rough_noise_is_enough_and_that_of_dp_accounting(
    epsilon: float, delta: float, rate: float, steps: int, noise: float
) -> None:
    found = rough_noise_multiplier(rate, steps, epsilon, delta)
    assert noise <= found <= 1.4 * noise
    oracle = RdpAccountant([*range(2, 128), 256, 512, 1024])
    oracle.compose(dp_sgd_event(found, rate, steps))
    assert oracle.get_epsilon(delta) == pytest.approx(epsilon, rel=0.06)


def test_rough_noise_stays_within_its_limits() -> None:
    assert rough_noise_multiplier(0.001, 1, 1e6, 1e-5) == MIN_NOISE_MULTIPLIER
    assert rough_noise_multiplier(1.0, 10**9, 1e-6, 1e-5) == MAX_NOISE_MULTIPLIER


@settings(max_examples=6, deadline=None)
@given(epsilon=st.floats(0.1, 5), rate=st.floats(0.001, 0.2), steps=st.integers(1, 100), others=st.floats(5, 500))
def test_solved_noise_is_least(epsilon: float, rate: float, steps: int, others: float) -> None:
    known = [gaussian_event(others)]
    if prv_epsilon([gaussian_event(others), dp_sgd_event(1e5, rate, steps)], 1e-5) > epsilon:
        with pytest.raises(InputError, match=r"epsilon .*: no noise is enough"):
            solve_noise_multiplier(steps_of(rate, steps), epsilon, 1e-5, known)
        return
    noise = solve_noise_multiplier(steps_of(rate, steps), epsilon, 1e-5, known)
    assert prv_epsilon([dp_sgd_event(noise, rate, steps), *known], 1e-5) <= epsilon
    if noise > MIN_NOISE_MULTIPLIER:
        # the bound's own numerical error jumps a little with what is first guessed
        assert prv_epsilon([dp_sgd_event(noise * 0.997, rate, steps), *known], 1e-5) > epsilon * 0.998


def test_a_delta_that_takes_the_noise_of_several_releases_is_named() -> None:
    # each of them alone is within its share, by a delta that allows it to fail half of the time
    small = [gaussian_event(single_noise_multiplier(share, 0.5)) for share in (0.05, 0.1)]
    with pytest.raises(InputError, match=r"^delta 0\.5: is so large that .* share of epsilon 1 .*; give a smaller"):
        solve_noise_multiplier(steps_of(0.25, 40), 1.0, 0.5, small)
    one = solve_noise_multiplier(steps_of(0.25, 40), 1.0, 0.5, small[:1])
    assert one < solve_noise_multiplier(steps_of(0.25, 40), 1.0, 0.06, [gaussian_event(10.0)])


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(0.5, 0.01, 300_000), (0.45, 0.001, 230_000)])
def test_noise_is_found_where_rounding_leaves_renyi_divergences(epsilon: float, rate: float, steps: int) -> None:
    """Of which high orders tell least where epsilon is small against -log delta."""
    noise = solve_noise_multiplier(steps_of(rate, steps), epsilon, 1e-10)
    event = dp_sgd_event(noise, rate, steps)
    found = composition([event], 1e-10)
    assert not found.numerical
    assert found.epsilon == pytest.approx(epsilon, rel=2e-3)
    # dp-accounting's Renyi divergences, at orders of their own
    accountant = RdpAccountant([1.5, *range(2, 256), 512, 1024])
    accountant.compose(event)
    assert found.epsilon >= accountant.get_epsilon(1e-10) * 0.999


def test_a_budget_that_needs_next_to_no_noise_gets_the_least() -> None:
    assert solve_noise_multiplier(steps_of(0.1, 100), 1e6, 1e-5) == MIN_NOISE_MULTIPLIER


def test_where_others_take_nearly_everything_prv_still_finds_room() -> None:
    """By RDP the other release alone is above epsilon."""
    other = gaussian_event(4.4)
    assert prv_epsilon([other], 1e-6) < 1 < rdp_epsilon([other], 1e-6)
    noise = solve_noise_multiplier(steps_of(0.02, 150), 1.0, 1e-6, [other])
    assert noise == pytest.approx(4.339, rel=2e-3)


@pytest.mark.parametrize(
    ("epsilon", "delta", "noise"),
    [(1, 1e-6, 4.224678889), (0.001, 1e-6, 2436.552494), (10, 1e-5, 0.4998886197), (100, 1e-9, 0.1062264798),
     (1e-6, 1e-8, 1724094.526), (0.0001, 0.5, 0.7412578811)],
)  # fmt: skip
def test_one_gaussian_release(epsilon: float, delta: float, noise: float) -> None:
    """Balle and Wang's closed form, which holds with equality."""
    s = single_noise_multiplier(epsilon, delta)
    assert s == pytest.approx(noise, rel=1e-8)
    phi = stats.norm
    spent = phi.cdf(0.5 / s - epsilon * s) - math.exp(epsilon + phi.logcdf(-0.5 / s - epsilon * s))
    assert spent == pytest.approx(delta, rel=1e-5)


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps"),
    [(0.01, 1e-10, 0.1, 10), (0.2, 1e-5, 1 / 60, 800), (1.0, 1e-5, 1 / 60, 800), (0.05, 1e-5, 0.1, 10)],
)
def test_little_of_a_budget_is_lost_to_the_numerical_error(
    epsilon: float, delta: float, rate: float, steps: int
) -> None:
    """By another library's accountant the noise spends nearly all of it, also where RDP is far off."""
    noise = solve_noise_multiplier(steps_of(rate, steps), epsilon, delta)
    spent = pld_epsilon([dp_sgd_event(noise, rate, steps)], delta)
    assert 0.95 * epsilon < spent <= epsilon


@pytest.mark.parametrize("delta", [0.5, 0.95])
def test_a_delta_that_promises_nothing_is_a_bound_or_one_line(delta: float) -> None:
    try:
        noise = solve_noise_multiplier(steps_of(0.1, 10), 1.0, delta)
    except InputError as error:
        assert error.field == "delta"
    else:
        assert pld_epsilon([dp_sgd_event(noise, 0.1, 10)], delta) <= 1


def test_epsilon_is_never_negative_and_can_be_solved_for_small_sets() -> None:
    assert prv_epsilon([dp_sgd_event(4.0, 0.1, 1)], 0.1) >= 0
    noise = solve_noise_multiplier(steps_of(0.1, 1), 1.0, 0.043)
    assert prv_epsilon([dp_sgd_event(noise, 0.1, 1)], 0.043) <= 1


def test_subsampled_steps_and_a_gaussian_release_compose_as_in_another_library() -> None:
    steps, single = dp_sgd_event(2.0, 0.02, 150), gaussian_event(20.0)
    loss = privacy_loss_distribution.from_gaussian_mechanism
    losses = loss(2.0, sampling_prob=0.02, value_discretization_interval=1e-4).self_compose(150)
    expected = losses.compose(loss(20.0, value_discretization_interval=1e-4)).get_epsilon_for_delta(1e-6)
    assert prv_epsilon([steps, single], 1e-6) == pytest.approx(expected, abs=0.02)
    assert prv_epsilon([single, steps], 1e-6) == pytest.approx(expected, abs=0.02)
    assert pld_epsilon([single, steps], 1e-6) == pytest.approx(expected, rel=2e-3)
    noise = solve_noise_multiplier(steps_of(0.02, 150), 1.0, 1e-6, [single])
    assert 0.98 <= prv_epsilon([dp_sgd_event(noise, 0.02, 150), single], 1e-6) <= 1
    assert noise > solve_noise_multiplier(steps_of(0.02, 150), 1.0, 1e-6)
