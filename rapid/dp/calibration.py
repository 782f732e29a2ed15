"""The noise that a wanted epsilon needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
from dp_accounting import DpEvent
from scipy.optimize import bisect

from rapid.dp.accounting import prv_epsilon, prv_of_steps
from rapid.dp.events import compose, poisson_gaussian_steps
from rapid.dp.renyi_bound import renyi_bound
from rapid.errors import InputError
from rapid.rounding import as_typed, rounded_up

MAX_NOISE_MULTIPLIER = 1e5
MIN_NOISE_MULTIPLIER = 0.1
RELATIVE_TOLERANCE = 1e-3
ROUGH_TOLERANCE = 0.02
SECANTS = 9
"""Of the search that is tried first; it mostly needs four or five."""
SLOPE = 2.0
"""A first guess of how the logarithm of epsilon rises with that of 1 / noise multiplier."""


def single_noise_multiplier(epsilon: float, delta: float) -> float:
    """The noise multiplier with which one Gaussian release is (epsilon, delta)-DP (Balle and Wang 2018).

    Unlike numerical composition it is accurate for any epsilon, however small. Report the epsilon of a whole
    composition by an accountant.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
    """
    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def rough_noise_multiplier(sample_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """A noise multiplier with which DP-SGD by itself is (epsilon, delta)-DP: quickly found, and more than it needs.

    For comparing settings. It is Renyi divergences' answer, to two percent.

    Args:
        sample_rate: in (0, 1].
        steps: >= 1.
        epsilon: > 0.
        delta: in (0, 1).

    Returns:
        noise multiplier, from MIN_NOISE_MULTIPLIER to MAX_NOISE_MULTIPLIER, whether these are enough or not.
    """

    def excess(level: float) -> float:
        return renyi_bound([(math.exp(-level), sample_rate, steps)], delta) - epsilon

    low, high = -math.log(MAX_NOISE_MULTIPLIER), -math.log(MIN_NOISE_MULTIPLIER)
    if excess(high) <= 0:
        return MIN_NOISE_MULTIPLIER
    if excess(low) >= 0:
        return MAX_NOISE_MULTIPLIER
    return math.exp(-bisect(excess, low, high, xtol=ROUGH_TOLERANCE / 2)) * (1 + ROUGH_TOLERANCE / 2)


def solve_noise_multiplier(
    make_event: Callable[[float], DpEvent], epsilon: float, delta: float, others: Sequence[DpEvent] = ()
) -> float:
    """The least noise multiplier, to a thousandth, whose `prv_epsilon` together with `others` is at most `epsilon`.

    Args:
        make_event: the release at a given noise multiplier.
        epsilon: > 0.
        delta: in (0, 1).
        others: what else is released of the same images.

    Returns:
        noise multiplier, at least about MIN_NOISE_MULTIPLIER.

    Raises:
        InputError: no noise multiplier up to MAX_NOISE_MULTIPLIER is enough; or `delta` is so large beside `epsilon`
            that the others, each within it, spend more together.
    """

    def event(level: float) -> DpEvent:
        return compose([make_event(math.exp(-level)), *others])

    def bound(level: float) -> float:
        return renyi_bound(poisson_gaussian_steps(event(level)), delta)

    # levels are minus the logarithm of the noise multiplier: epsilon rises with them, and the tolerance is relative
    low, high = -math.log(MAX_NOISE_MULTIPLIER), -math.log(MIN_NOISE_MULTIPLIER)
    if bound(high) <= epsilon:
        return MIN_NOISE_MULTIPLIER
    # quick and never below PRV, so its answer bounds the search
    if bound(low) < epsilon:
        bracket = dp_accounting.ExplicitBracketInterval(low, high)
        low = _calibrate(_Renyi, event, epsilon, delta, bracket)
    elif prv_epsilon([event(low)], delta) > epsilon:
        # at a small delta what each spends adds up by squares; a large one allows each to fail, and all fail more often
        alone, spent = math.hypot(*(prv_epsilon([one], delta) for one in others)), prv_epsilon(others, delta)
        if alone <= epsilon < spent:
            problem = f"is so large that what has a share of epsilon {as_typed(epsilon)} spends {rounded_up(spent)}"
            raise InputError("delta", f"{problem}; give a smaller one, well under 1/N", as_typed(delta))
        raise InputError("epsilon", "no noise is enough for all that is released; use fewer steps", epsilon)
    level = _by_secants(lambda level: prv_epsilon([event(level)], delta), epsilon, low, high)
    if level is None:
        level = _calibrate(_Prv, event, epsilon, delta, dp_accounting.LowerEndpointAndGuess(low, low + 0.2))
    return math.exp(-level)


def _by_secants(epsilon_at: Callable[[float], float], epsilon: float, low: float, high: float) -> float | None:
    """A level whose epsilon is `epsilon` or slightly less, by secants of its logarithm, which is almost straight.

    Args:
        epsilon_at: epsilon of a level; each takes up to a second.
        epsilon: > 0.
        low: a level whose epsilon is at most `epsilon`; the first to be tried.
        high: the largest.

    Returns:
        The level, to RELATIVE_TOLERANCE; None if the line is not straight enough.
    """
    half = RELATIVE_TOLERANCE / 2
    level, slope, last = low, SLOPE, None
    for _ in range(SECANTS):
        found = epsilon_at(level)
        if not 0 < found < math.inf:
            return None
        above = math.log(found / epsilon)
        if last is not None:
            slope = (above - last[1]) / (level - last[0])
        # half of the tolerance below the level that would spend all
        aim = -half * min(1.0, slope)
        if slope <= 0:
            return None
        if 2 * aim <= above <= 0:
            return level
        last = level, above
        level -= (above - aim) / slope
        if not low <= level <= high:
            return None
    return None


def _calibrate(
    accountant: Callable[[], dp_accounting.PrivacyAccountant],
    event: Callable[[float], DpEvent],
    epsilon: float,
    delta: float,
    bracket: dp_accounting.BracketInterval,
) -> float:
    tolerance = RELATIVE_TOLERANCE / 2
    return float(dp_accounting.calibrate_dp_mechanism(accountant, event, epsilon, delta, bracket, tol=tolerance))


class _Prv(dp_accounting.PrivacyAccountant):  # type: ignore[misc]
    """Opacus' PRV for dp-accounting's calibration."""

    def __init__(self) -> None:
        super().__init__(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        self.history: list[tuple[float, float, int]] = []

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        try:
            rows = poisson_gaussian_steps(dp_accounting.SelfComposedDpEvent(event, count))
        except ValueError as error:
            return self.CompositionErrorDetails(event, str(error))
        if do_compose:
            self.history += rows
        return None

    def get_epsilon(self, target_delta: float) -> float:
        return prv_of_steps(self.history, target_delta)


class _Renyi(_Prv):
    """The bound that PRV starts from."""

    def get_epsilon(self, target_delta: float) -> float:
        return renyi_bound(self.history, target_delta)
