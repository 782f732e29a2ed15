"""Renyi divergences of any tree of events: also of private selection, for which nothing else is known.

Orders are whole numbers: at fractional orders the series of both accountant libraries can fail to converge, with
negative or infinite results. It makes epsilon larger by about 2 % at epsilon 9, and by less where it is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata

import dp_accounting
import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, NoOpDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from numpy.typing import NDArray

from rapid.dp.events import (
    LEAST_NOISE,
    OneOfDpEvent,
    compose,
    dp_sgd_event,
    has_selection,
    poisson_gaussian_steps,
)
from rapid.dp.renyi_bound import epsilon_of
from rapid.dp.trials import Trials
from rapid.errors import PrivacyRefused

ORDERS = (*range(2, 64), *(base << shift for shift in range(4) for base in (64, 80, 96, 112)), 1024)
"""Orders among which the best is taken."""


def renyi_accountant_name() -> str:
    """Name and version of the accountant, for privacy statements."""
    return f"RDP of private selection (rapid; single steps: dp-accounting {metadata.version('dp-accounting')})"


def renyi_epsilon(events: Sequence[DpEvent], delta: float) -> float:
    """Upper bound on epsilon at `delta` of all events together.

    Args:
        events: of the same images, in any order, with private selection among them or not.
        delta: in (0, 1).

    Returns:
        epsilon; infinity if a release has no noise.

    Raises:
        PrivacyRefused: the accountant gives no number.
    """
    total = renyi_divergences(compose(events), ORDERS)
    return epsilon_of(total, ORDERS, delta) if total.any() else 0.0


def library_epsilon(event: RepeatAndSelectDpEvent, delta: float) -> float:
    """Epsilon at `delta` of a private selection by dp-accounting, an independent implementation, for comparison.

    It knows no choice among candidates, so it gets each alone, and the largest epsilon is returned: it may be lower
    than that of the selection, but not higher.

    Args:
        event: all trials together.
        delta: in (0, 1).
    """

    def alone(trial: DpEvent) -> float:
        accountant = dp_accounting.rdp.RdpAccountant(orders=list(ORDERS))
        accountant.compose(RepeatAndSelectDpEvent(trial, event.mean, event.shape))
        return float(accountant.get_epsilon(delta))

    return max(alone(trial) for trial in candidates_of(event))


def candidates_of(event: RepeatAndSelectDpEvent) -> tuple[DpEvent, ...]:
    """The events of which a trial is one."""
    return event.event.events if isinstance(event.event, OneOfDpEvent) else (event.event,)


def divergence_at(event: DpEvent, order: int) -> float:
    """Upper bound on the Renyi divergence of an event at one order, >= 0; infinity if a release has no noise.

    Args:
        event: any tree of `rapid.dp.events`.
        order: whole number, at least 2.

    Raises:
        PrivacyRefused: the accountant gives no number.
    """
    # selection combines divergences at two orders
    orders = sorted({*ORDERS, order}) if has_selection(event) else [order]
    return float(renyi_divergences(event, orders)[orders.index(order)])


def renyi_divergences(event: DpEvent, orders: Sequence[int]) -> NDArray[np.float64]:
    """Upper bounds on the Renyi divergences of an event; all orders take part in each bound of a selection.

    Args:
        event: any tree of `rapid.dp.events`.
        orders: whole numbers, ascending, each at least 2.

    Returns:
        float64 (n,), >= 0.

    Raises:
        PrivacyRefused: the accountant gives no number.
        ValueError: the tree holds an event that rapid does not release.
    """
    found = np.maximum(_divergences(event, tuple(orders)), 0.0)
    if np.isnan(found).any():
        raise PrivacyRefused("an accountant gives no number for a Renyi divergence; report the settings, use others")
    return np.asarray(found)


def _divergences(event: DpEvent, orders: tuple[int, ...]) -> NDArray[np.float64]:
    match event:
        case NoOpDpEvent():
            return np.zeros(len(orders))
        case SelfComposedDpEvent():
            return _total(orders, [event.count * _divergences(event.event, orders)] if event.count else [])
        case ComposedDpEvent():
            return _total(orders, [_divergences(part, orders) for part in event.events])
        case OneOfDpEvent():
            return np.asarray(np.max([_divergences(part, orders) for part in event.events], axis=0))
        case RepeatAndSelectDpEvent():
            trials = Trials(mean=event.mean, shape=event.shape)
            return trials.divergences(orders, _divergences(event.event, orders))
    rows = poisson_gaussian_steps(event)
    return _total(orders, [count * _of_step(noise, rate, orders) for noise, rate, count in rows])


def _total(orders: tuple[int, ...], parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.asarray(np.sum([np.zeros(len(orders)), *parts], axis=0))


def _of_step(noise_multiplier: float, sample_rate: float, orders: tuple[int, ...]) -> NDArray[np.float64]:
    return np.array([rdp_of_step(noise_multiplier, sample_rate, order) for order in orders])


@lru_cache(maxsize=1 << 15)  # the ledger, and the search for noise, ask for the same releases again
def rdp_of_step(noise_multiplier: float, sample_rate: float, order: int) -> float:
    """Renyi divergence of one step of the Poisson-subsampled Gaussian mechanism (Mironov, Talwar, Zhang 2019)."""
    if noise_multiplier < LEAST_NOISE:
        return math.inf
    accountant = dp_accounting.rdp.RdpAccountant(orders=[order])
    accountant.compose(dp_sgd_event(noise_multiplier, sample_rate, 1))
    return float(accountant.rdp[0])
