"""A random number of trials, of which only the best is released (Papernot and Steinke 2022, arXiv 2110.03620).

A trial is any mechanism whose result ends in a score. If their number were fixed and released, the best of m trials
could cost m times as much as one. If it is random and kept secret, the best of all costs two to three times as much,
however many there are on average.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from mpmath.ctx_mp import MPContext
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

LARGEST_MEAN = 10_000.0
LARGEST_SHAPE = 100.0
BITS = 256
"""Of the uniform number from which a number of trials is drawn; all probabilities are right to 2^-250."""

_PRECISE = MPContext()  # of our own: its precision is a state
_PRECISE.prec = BITS + 64


class Trials(BaseModel):
    """The truncated negative binomial distribution of the number of trials K >= 1 (definition 1 of the paper).

        P(K = k) is proportional to (1 - gamma)^k (shape + 0) (shape + 1) ... (shape + k - 1) / k!

    Shape 1 is the geometric distribution, shape 0 the logarithmic one. The smaller the shape, the less epsilon a mean
    costs, and the more the number varies: with shape 0 there is often one trial, and sometimes very many.

    Attributes:
        mean: of the number of trials, > 1.
        shape: eta of the paper, >= 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float = Field(gt=1, le=LARGEST_MEAN)
    shape: float = Field(1.0, ge=0, le=LARGEST_SHAPE)

    @property
    def gamma(self) -> float:
        """The parameter gamma in (0, 1) that gives this mean, rounded up: the mean is never above `mean`."""
        return _gamma(self.mean, self.shape)

    def event(self, trial: DpEvent) -> DpEvent:
        """The event of drawing the number of trials, and of releasing the best one.

        Args:
            trial: event of one trial, with its score.
        """
        return RepeatAndSelectDpEvent(trial, self.mean, self.shape)

    def draw(self) -> int:
        """A number of trials, by the operating system's random numbers. Never to be released."""
        return self.number(secrets.randbits(BITS))

    def number(self, bits: int) -> int:
        """The number of trials at which the distribution function first exceeds bits / 2^256.

        Args:
            bits: in 0..2^256 - 1.
        """
        level, total = _PRECISE.mpf(bits) / 2**BITS, _PRECISE.mpf(0)
        number = 1
        for probability in self._probabilities():
            total += probability
            if total > level:
                break
            number += 1
        return number

    def quantile(self, share: float) -> int:
        """The least number that is not exceeded with a probability of at least `share`, in (0, 1)."""
        return self.number(math.ceil(share * 2**BITS) - 1)

    def divergences(self, orders: ArrayLike, trial: ArrayLike) -> NDArray[np.float64]:
        """Renyi divergences of the best trial (theorem 2 of the paper).

        Ties between scores go to the earlier trial. That is the theorem's total order: trials are exchangeable, so the
        result is distributed as if equal scores were compared by independent random numbers.

        Args:
            orders: Renyi orders, ascending, > 1, float (n,).
            trial: divergences of one trial at these orders, float (n,).

        Returns:
            float64 (n,), upper bounds at the same orders.
        """
        order, divergence = np.asarray(orders, np.float64), np.asarray(trial, np.float64)
        # the theorem takes a second order, any one: the best of all
        second = float(((1 - 1 / order) * divergence - math.log(self.gamma) / order).min())
        bounds = divergence + (1 + self.shape) * second + math.log(self.mean) / (order - 1)
        # divergences rise with the order, so a bound at a higher order is one here, too
        return np.asarray(np.minimum.accumulate(bounds[::-1])[::-1])

    def _probabilities(self) -> Iterator[Any]:
        """P(K = 1), P(K = 2), ... until they have fallen below 2^-300."""
        stays, shape = 1 - _PRECISE.mpf(self.gamma), _PRECISE.mpf(self.shape)
        # expm1, because the shape may be tiny
        whole = _PRECISE.expm1(-shape * _PRECISE.log(1 - stays)) if self.shape else -_PRECISE.log(1 - stays)
        probability, number = stays * (shape if self.shape else 1) / whole, 1
        least, ratio = _PRECISE.mpf(2) ** -(BITS + 44), stays * (1 + shape) / 2
        # with a large shape the first ones are below it, too, and rise
        while probability > least or ratio > 1:
            yield probability
            probability *= ratio
            number += 1
            ratio = stays * (number + shape) / (number + 1)


@lru_cache(maxsize=256)
def _gamma(mean: float, shape: float) -> float:
    """See `Trials.gamma`; the mean falls as gamma rises."""
    low, high = _PRECISE.mpf(2) ** -200, _PRECISE.mpf(1) - _PRECISE.mpf(2) ** -100
    while high - low > high * _PRECISE.mpf(2) ** -60:
        # by the geometric mean: gamma may be tiny
        middle = _PRECISE.sqrt(low * high)
        low, high = (middle, high) if _mean(middle, shape) > mean else (low, middle)
    return min(float(high) * (1 + 1e-15), math.nextafter(1.0, 0.0))


def _mean(gamma: Any, shape: float) -> Any:
    if shape == 0:
        return (1 - 1 / gamma) / _PRECISE.log(gamma)
    return -shape * (1 - gamma) / (gamma * _PRECISE.expm1(shape * _PRECISE.log(gamma)))
