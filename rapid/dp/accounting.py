"""Epsilon of what is released, by three accountants, and the noise that a wanted epsilon needs.

Releases are `dp_accounting.DpEvent` trees (see `rapid.dp.events`); adjacency is adding or removing one image.

    PRV  numerical composition of privacy random variables (Gopi, Lee, Wutschitz 2021; Opacus): what is reported
    PLD  privacy loss distributions (Koskela et al. 2020; dp-accounting): independent code that checks PRV
    RDP  Renyi differential privacy (Mironov, Talwar, Zhang 2019; Opacus): looser, by other means; the only one that
         knows private selection (see `rapid.dp.renyi`)

All return upper bounds. For groups of images it is the privacy loss distribution of the mixture of Gaussians that
dominates a group's share in a step (Ganesh 2024).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache, reduce
from importlib import metadata
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.prv import Domain
from scipy.stats import binom

from rapid.dp.events import compose, has_no_noise, has_selection, poisson_gaussian_steps
from rapid.dp.renyi import divergence_at, rdp_of_step, renyi_accountant_name, renyi_epsilon
from rapid.dp.renyi_bound import LOW_ORDERS, ORDERS, renyi_bound
from rapid.errors import InputError, PrivacyRefused
from rapid.rounding import as_typed

DISAGREEMENT, LARGEST_DISAGREEMENT = 0.02, 0.02
"""By which a second accountant's epsilon may exceed the first one's: in parts of it, and absolutely."""
LARGEST_CHECKED = 100.0
"""Epsilon above which the second accountant may leave infinity; such an epsilon protects hardly anyone."""
LARGEST_ERROR = 0.02
"""Of a numerical bound, in parts of itself, as far as `MOST_POINTS` allow."""
MOST_POINTS = 1 << 21
"""Of the domain of a second, finer composition: more take seconds each time."""
LARGEST_NUMERICAL = 500.0
"""Epsilon above which Renyi divergences are used: PRV tells far too little where e^epsilon exceeds float64, at 709."""
LARGEST_PLD = 1e4
"""Epsilon above which the grid of PLD has too many points."""
LARGEST_DOMAIN = 1 << 24
"""Points of PRV's domain above which it takes too much memory, as where an image is hit rarely but then hard."""
ROUNDING = 2.0**-52
"""What float64 may cost of delta in each step of a numerical composition; about 5e-17 was seen."""


def accountant_name() -> str:
    """Name and version of the accountant, for privacy statements."""
    return f"PRV (opacus {metadata.version('opacus')})"


def pld_accountant_name() -> str:
    """Name and version of the second accountant, for privacy statements."""
    return f"PLD (dp-accounting {metadata.version('dp-accounting')})"


def group_accountant_name() -> str:
    """Name and version of the accountant for groups, for privacy statements."""
    return f"PLD of a mixture of Gaussians (dp-accounting {metadata.version('dp-accounting')})"


def rdp_accountant_name() -> str:
    """Name and version of the accountant where numerical composition is not reliable, for privacy statements."""
    return f"RDP (opacus {metadata.version('opacus')})"


class Composition(NamedTuple):
    """Epsilon of all events together, and how it was found."""

    epsilon: float
    numerical: bool
    """Whether by numerical composition; else by Renyi divergences, which tell more."""
    accountant: str
    """Its name and version, for privacy statements."""


def composition(events: Sequence[DpEvent], delta: float) -> Composition:
    """As `prv_epsilon`, with the accountant that it takes."""
    together = compose(events)
    if has_selection(together):
        return Composition(renyi_epsilon(events, delta), False, renyi_accountant_name())
    epsilon, numerical = _prv_of_rows(tuple(poisson_gaussian_steps(together)), delta)
    return Composition(epsilon, numerical, accountant_name() if numerical else rdp_accountant_name())


def prv_epsilon(events: Sequence[DpEvent], delta: float) -> float:
    """Upper bound on epsilon at `delta` of all events together, by numerical composition.

    By Renyi divergences, all of them, if there is private selection among them, which has no other accountant. So, too,
    where numerical composition is not reliable: above `LARGEST_NUMERICAL`, with so many steps at so small a delta that
    rounding would decide, and on domains above `LARGEST_DOMAIN`.

    Args:
        events: what is released of the same images, in any order; epsilon is 0 without any.
        delta: in (0, 1).

    Returns:
        epsilon; infinity if a release has no noise, or less than `rapid.dp.events.LEAST_NOISE`.

    Raises:
        ValueError: an event that rapid does not release.
        InputError: epsilon cannot be computed for this delta. Below 1e-10 it may be too low; see `check_budget`.
        PrivacyRefused: the accountant gives no number.
    """
    return composition(events, delta).epsilon


def agrees(first: float, second: float) -> bool:
    """Whether a second accountant's epsilon confirms the first one's: it may be lower, or higher by what grids cost."""
    if first > LARGEST_CHECKED and second == math.inf:
        return True
    # a NaN fails this comparison
    return second <= first * (1 + DISAGREEMENT) + min(LARGEST_DISAGREEMENT, first / 10 + 2e-3)


def rdp_epsilon(events: Sequence[DpEvent], delta: float, *, orders: Sequence[float] | None = None) -> float:
    """Upper bound on epsilon at `delta` by Renyi differential privacy.

    Args:
        events: as `prv_epsilon`.
        delta: in (0, 1).
        orders: Renyi orders, each > 1, among which the best is taken; Opacus' own by default.
    """
    return rdp_of_steps(poisson_gaussian_steps(compose(events)), delta, orders)


def rdp_at_order(events: Sequence[DpEvent], order: int) -> float:
    """Renyi divergence of all events together at one order (Mironov, Talwar, Zhang 2019; dp-accounting).

    Args:
        events: as `prv_epsilon`; they may be chosen adaptively.
        order: whole number, at least 2; series for fractional orders do not always converge.

    Returns:
        the divergence, >= 0; infinity if a release has no noise.

    Raises:
        PrivacyRefused: the accountant gives no number.
    """
    if has_selection(together := compose(events)):
        return divergence_at(together, order)
    rows = poisson_gaussian_steps(together)
    total = math.fsum(steps * rdp_of_step(noise, rate, order) for noise, rate, steps in rows)
    return _number(total, f"Renyi divergence of order {order}")


def _number(value: float, what: str) -> float:
    """The value, at least 0, unless it is NaN: max(0.0, nan) is 0.0."""
    if math.isnan(value):
        raise PrivacyRefused(f"an accountant gives no number for the {what}; report the settings, and use others")
    return max(0.0, value)


def pld_epsilon(events: Sequence[DpEvent], delta: float) -> float:
    """Upper bound on epsilon at `delta` by privacy loss distributions; arguments as `prv_epsilon`.

    Where epsilon is in the hundreds its truncation may leave infinity. Above `LARGEST_PLD`, and for so many steps at so
    small a delta that rounding would decide, it is the library's bound by Renyi divergences.
    """
    history = poisson_gaussian_steps(compose(events))
    if has_no_noise(history):
        return math.inf
    if not history:
        return 0.0
    rough, exact = renyi_bound(history, delta, LOW_ORDERS), _without_rounding(history, delta)
    if rough > LARGEST_PLD or exact is None:
        # by the same library
        accountant = dp_accounting.rdp.RdpAccountant()
        return float(accountant.compose(compose(events)).get_epsilon(delta))
    accountant = PLDAccountant(value_discretization_interval=max(1e-5, min(rough * 3e-4, _interval(history, rough))))
    with np.errstate(over="ignore"):  # of a ratio that it compares
        epsilon = float(accountant.compose(compose(events)).get_epsilon(exact))
    return _number(epsilon, f"epsilon at delta {as_typed(delta)} (PLD)")


def _interval(history: Sequence[tuple[float, float, int]], epsilon: float) -> float:
    """Distance of losses on a grid, whose error in epsilon is about steps * interval^2: a thousandth of epsilon."""
    return min(1e-2, math.sqrt(epsilon * 1e-3 / sum(steps for _, _, steps in history)))


def _without_rounding(history: Sequence[tuple[float, float, int]], delta: float) -> float | None:
    """What is left of delta for a numerical composition; None if rounding may cost more than half of it."""
    left = delta - ROUNDING * sum(steps for _, _, steps in history)
    return left if left >= delta / 2 else None


def group_epsilon(events: Sequence[DpEvent], delta: float, group_size: int) -> float:
    """Upper bound on epsilon at `delta` for adding or removing all `group_size` images of one person at once.

    Each image is drawn by itself, so j of m images meet in a step with the binomial probability, and together they move
    the sum by at most j clip norms. This is far less than the textbook's m epsilon at e^((m - 1) epsilon) delta.

    Args:
        events: as `prv_epsilon`; sensitivities are those of one image.
        delta: in (0, 1).
        group_size: m, at least 1.
    """
    history = poisson_gaussian_steps(compose(events))
    if group_size == 1 or not history or has_no_noise(history):
        return prv_of_steps(history, delta)
    # a coarser grid is looser, never too low
    interval = max(1e-5, _interval(history, renyi_bound(history, delta) * group_size))
    losses = [
        _group_loss(noise_multiplier, sample_rate, group_size, interval).self_compose(steps)
        for noise_multiplier, sample_rate, steps in history
    ]
    together = reduce(lambda one, other: one.compose(other), losses)
    exact = _without_rounding(history, delta)
    found = math.inf if exact is None else float(together.get_epsilon_for_delta(exact))
    return _number(found, f"epsilon of {group_size} images at delta {as_typed(delta)}")


def _group_loss(noise_multiplier: float, sample_rate: float, group_size: int, interval: float) -> Any:
    """The privacy loss distribution of one step for a group, with losses that are `interval` apart."""
    if sample_rate == 1:
        # one Gaussian; the mixture's search for its tail can fail here by rounding
        return privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier / group_size, value_discretization_interval=interval
        )
    shifts = np.arange(group_size + 1)
    probabilities = binom.pmf(shifts, group_size, sample_rate)
    return privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise_multiplier,
        [float(shift) for shift in shifts],
        list(probabilities / probabilities.sum()),
        value_discretization_interval=interval,
    )


class _PrvAccountant(PRVAccountant):  # type: ignore[misc]
    """Opacus' PRV, but the size of its domain is bounded by RDP at whole orders.

    Opacus takes a hundred fractional orders for it, which is two thirds of the time. The domain is slightly larger.
    """

    def _get_domain(self, prvs: Any, num_self_compositions: list[int], eps_error: float, delta_error: float) -> Domain:
        size = _domain_size(self.history, delta_error, eps_error)
        return Domain.create_aligned(-size, size, eps_error / _fineness(self.history, delta_error))


def prv_of_steps(history: Sequence[tuple[float, float, int]], delta: float) -> float:
    """`prv_epsilon` of rows (noise_multiplier, sample_rate, steps)."""
    return _prv_of_rows(tuple(history), delta).epsilon


class _Composed(NamedTuple):
    """Epsilon, and whether it is that of the numerical composition, not of Renyi divergences."""

    epsilon: float
    numerical: bool = True


@lru_cache(maxsize=256)  # calibration and statements ask for the same rows again
def _prv_of_rows(history: tuple[tuple[float, float, int], ...], delta: float) -> _Composed:
    if has_no_noise(history):
        return _Composed(math.inf)
    if not history:
        return _Composed(0.0)
    rough, exact = renyi_bound(history, delta), _without_rounding(history, delta)
    if rough > LARGEST_NUMERICAL or exact is None:
        rough = _best_rdp(history, delta)
    if rough > LARGEST_NUMERICAL or exact is None:
        return _Composed(rough, numerical=False)
    # the numerical error is part of the bound: small against epsilon itself, but not so small for large ones that time
    # and memory grow without end
    error = max(1e-3, min(0.01, rough / 50), rough / 1000)
    points = 2 * _domain_size(history, exact / 1000, 0.0) * _fineness(history, exact / 1000)
    if points / error > LARGEST_DOMAIN:
        return _Composed(_best_rdp(history, delta), numerical=False)
    bound = min(_prv_within(history, exact, error, delta), rough)
    # RDP told too much, as it does where epsilon is small or very large
    better = max(LARGEST_ERROR * bound / 2, points / MOST_POINTS)
    if error > LARGEST_ERROR * bound and better < error / 2:
        # rounding may be too coarse for it, and the first bound holds
        with contextlib.suppress(InputError):
            bound = min(bound, _prv_within(history, exact, better, delta))
    return _Composed(bound)


def _best_rdp(history: Sequence[tuple[float, float, int]], delta: float) -> float:
    """What is reported where numerical composition is not reliable: the better of two sets of orders."""
    return min(rdp_of_steps(history, delta, ORDERS), rdp_of_steps(history, delta))


def _domain_size(history: Sequence[tuple[float, float, int]], delta_error: float, eps_error: float) -> float:
    """Half the width of the domain of a numerical composition (Gopi et al., remark 5.6, with Opacus' margin of 3)."""
    steps = sum(row[2] for row in history)
    each = [renyi_bound([(*row[:2], 1)], delta_error / (8 * steps), LOW_ORDERS) for row in history]
    return max(renyi_bound(history, delta_error / 4, LOW_ORDERS), *each, eps_error) + 3


def _fineness(history: Sequence[tuple[float, float, int]], delta_error: float) -> float:
    """By what the error in epsilon is divided for the distance of two points of the domain (ibid.)."""
    return math.sqrt(sum(row[2] for row in history) * math.log(12 / delta_error) / 2)


def _prv_within(history: Sequence[tuple[float, float, int]], delta: float, error: float, asked: float) -> float:
    """An upper bound on epsilon, too high by at most about twice `error`; messages name the delta `asked` for."""
    accountant = _PrvAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        # it takes a first guess from RDP, which warns when the best order is the first or last
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            bound = float(accountant.get_epsilon(delta, eps_error=error))
        except (ValueError, RuntimeError) as problem:
            raise InputError("delta", f"epsilon cannot be computed for it ({problem})", asked) from problem
    return _number(bound, f"epsilon at delta {asked:g} (PRV)")


def rdp_of_steps(
    history: Sequence[tuple[float, float, int]], delta: float, orders: Sequence[float] | None = None
) -> float:
    """`rdp_epsilon` of rows (noise_multiplier, sample_rate, steps)."""
    if has_no_noise(history):
        return math.inf
    if not history:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        # the bound holds all the same when the best order is the first or last
        warnings.simplefilter("ignore", UserWarning)
        bound = float(accountant.get_epsilon(delta, alphas=None if orders is None else list(orders)))
    return _number(bound, f"epsilon at delta {as_typed(delta)} (RDP)")
