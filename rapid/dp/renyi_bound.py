"""A quick upper bound on epsilon: Renyi divergences at whole orders, all at once.

Numerical composition and the search for noise begin with it, and it caps what numerical composition finds. Figures that
are reported as RDP are the libraries', which take ten times as long for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from rapid.dp.events import has_no_noise

LOW_ORDERS = tuple(range(2, 64))
ORDERS = (*LOW_ORDERS, *(round(2 ** (6 + third / 3)) for third in range(13)))
"""The lower orders alone tell no epsilon below a sixtieth of -log delta. Beyond 1,024 binomial coefficients leave
float64."""


def renyi_bound(history: Sequence[tuple[float, float, int]], delta: float, orders: tuple[int, ...] = ORDERS) -> float:
    """Upper bound on epsilon at `delta` of steps of the Poisson-subsampled Gaussian mechanism.

    Args:
        history: rows (noise_multiplier, sample_rate, steps).
        delta: in (0, 1).
        orders: whole numbers from 2 to 1,024, among which the best is taken.

    Returns:
        epsilon, >= 0; infinity if a step has no noise.
    """
    if has_no_noise(history):
        return math.inf
    total = sum((steps * _of_step(noise, rate, orders) for noise, rate, steps in history), np.zeros(len(orders)))
    return epsilon_of(total, orders, delta) if total.any() else 0.0


def epsilon_of(divergences: NDArray[np.float64], orders: Sequence[int], delta: float) -> float:
    """The epsilon that Renyi divergences promise (Canonne, Kamath, Steinke 2020, proposition 12).

    Args:
        divergences: of all releases together, >= 0, float64 (n,).
        orders: of each, > 1.
        delta: in (0, 1).
    """
    order = np.asarray(orders, np.float64)
    found = divergences + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)
    return max(0.0, float(found.min()))


@lru_cache(maxsize=256)
def _of_step(noise_multiplier: float, sample_rate: float, orders: tuple[int, ...]) -> NDArray[np.float64]:
    """Renyi divergences of one step, float64 (n,) (Mironov, Talwar, Zhang 2019, section 3.3)."""
    order = np.asarray(orders, np.float64)
    if sample_rate in (0, 1):
        return sample_rate * order / (2 * noise_multiplier**2)
    taken = np.arange(2, max(orders) + 1, dtype=np.float64)
    # the weights of a binomial distribution have the sum 1, so what exceeds 1 is a sum of positive terms
    weight = _log_binomials(orders) + taken * math.log(sample_rate)
    weight += np.maximum(order[:, None] - taken, 0) * math.log1p(-sample_rate)
    exponent = taken * (taken - 1) / (2 * noise_multiplier**2)
    excess = logsumexp(weight + exponent + np.log(-np.expm1(-exponent)), axis=1)
    return np.asarray(np.logaddexp(0, excess) / (order - 1))


@lru_cache(maxsize=4)
def _log_binomials(orders: tuple[int, ...]) -> NDArray[np.float64]:
    """Logarithms of "order over k", -inf where k exceeds the order; k from 2 on, float64 (n, largest order - 1)."""
    every = range(2, max(orders) + 1)
    return np.array([[math.log(math.comb(order, k)) if k <= order else -math.inf for k in every] for order in orders])
