"""Noise that is correlated over the steps of DP-SGD: banded matrix factorisation (DP-BandMF).

x_t is the sum of the clipped gradients of step t (t = 0, 1, ...), over C = 1 the clip norm. What is released is

    y_t = c_0 x_t + c_1 x_{t-1} + ... + c_{b-1} x_{t-b+1} + noise_multiplier * normal,     c_0^2 + ... + c_{b-1}^2 <= 1,

rounded to the public grid, and the optimiser gets the estimate that follows from y_0, ..., y_t alone:

    e_t = (y_t - c_1 e_{t-1} - ... - c_{b-1} e_{t-b+1}) / c_0.

With the lower triangular matrix M of the c_j, y = M x + noise and e = x + M^-1 noise. The noise of a step is larger
than independent noise, but later steps take a part of it back: sums over many steps have less (`noise_of_sums`).
b is the band. With b = 1 it is plain DP-SGD, and nothing of this module is used.

Formal guarantee. Units are dealt into b groups, without regard to what they are. A step draws only from the group whose
turn it is, each unit with probability q = b B / N; so a unit has a turn every b steps. All y of n steps together are
dominated by ceil(n / b) Poisson-sampled Gaussians of rate q and the noise multiplier (Choquette-Choo et al. 2023,
(Amplified) Banded Matrix Factorization, arXiv 2306.08153). The argument, for a unit that contributes nothing in the
neighbouring set, where N, the groups and everybody else are the same:

- Its turn at step t reaches y_t, ..., y_{t+b-1} only. These blocks of its turns are disjoint and follow each other, so
  they compose, also if later steps depend on earlier results.
- Within a block, take all earlier y and everything else that is drawn as given, except for the noise and the unit's
  coin. What the others add to y_{t+i} is then a function of the y before it, so subtracting it value by value is a
  bijection. What is left is noise, plus (c_0, c_1, ...) times the unit's clipped gradient g if the coin shows it. g
  depends on earlier y only, so it is the same in the whole block, and the l2 norm of all this is |c| |g| <= 1. The coin
  is independent of what was taken as given. That is one Poisson-sampled Gaussian. The last block may be cut short,
  which only leaves values out.
- A unit has at most ceil(n / b) turns.
- Other releases between the steps of a round compose with it as with any release: concurrently (Vadhan and Zhang 2023,
  Concurrent Composition Theorems for Differential Privacy).

A training that is stopped begins anew: the sums x of earlier steps are private and never stored, so M has one block on
its diagonal for each stretch. Sums near the end of a stretch reach fewer y, so columns of M only get shorter. Units are
dealt again, so a stretch must begin where a round of b steps does: then the turns of all stretches add up to at most
ceil(n / b). `DpSgdSpec.round_end` tells where that is, and states are saved only there. Where a round is cut off all
the same, because another process is lost, the rest of its steps is left out.

Several units have turns at different steps of a round, and their blocks overlap: figures for groups of units would need
another argument, and `calibrate` refuses them.

Finite precision: y is rounded exactly, given M x as float64 has it. The rounding errors of M x are about b 2^-53 of
sums of at most N clip norms, far less than the margin that gradients are clipped with (`ROUNDING_MARGIN`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter
from torch import Tensor

from rapid.dp.randomness import Randomness

Values = NDArray[np.float64]


class Correlation:
    """The encoding of sums and the decoding of what was released, of one stretch of steps.

    It holds the last b - 1 private sums and as many estimates, in memory only; a checkpoint must not have them.

    Args:
        coefficients: c, l2 norm at most 1, c_0 > 0.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._first, *self._rest = coefficients
        self._sums: deque[Tensor] = deque(maxlen=len(self._rest))
        self._estimates: deque[Tensor] = deque(maxlen=len(self._rest))

    def encode(self, total: Tensor) -> Tensor:
        """The next sum x_t, float64 (d,), becomes row t of M x; private, it has no noise yet."""
        mixed = total * self._first
        for coefficient, earlier in zip(self._rest, self._sums, strict=False):
            mixed.add_(earlier, alpha=coefficient)
        self._sums.appendleft(total)
        return mixed

    def decode(self, released: Tensor) -> Tensor:
        """The next y_t, float64 (d,), becomes the estimate of x_t; post-processing."""
        estimate = released.clone()
        for coefficient, earlier in zip(self._rest, self._estimates, strict=False):
            estimate.sub_(earlier, alpha=coefficient)
        estimate.div_(self._first)
        self._estimates.appendleft(estimate)
        return estimate.clone()


def deal(count: int, band: int, randomness: Randomness) -> Tensor:
    """Deal units into groups of equal size, up to one, at random; int64 (count,), each in 0..band-1."""
    groups = torch.empty(count, dtype=torch.int64)
    groups[randomness.uniform(count).argsort()] = torch.arange(count) % band
    return groups


@lru_cache(maxsize=256)
def coefficients(band: int, steps: int) -> tuple[float, ...]:
    """The c of least mean squared noise in the sums over the first 1, 2, ..., `steps` steps, found numerically.

    The search begins with the square root of the matrix of ones (Fichtenberger, Henzinger, Upadhyay 2023; in bands:
    Kalinin and Lampert 2024), which is near, and makes the noise smaller by 1 to 15 %. It is over banded Toeplitz
    matrices (McKenna 2024, arXiv 2405.15913) with c_j in [0, c_0].

    Args:
        band: b, at least 1.
        steps: n, at least 1.

    Returns:
        c_0, ..., c_{b-1}, not more than there are steps; the sum of their squares is at most 1, exactly.
    """
    size = min(band, steps)
    factors: Values = 1 - 0.5 / np.arange(1, size, dtype=np.float64)
    chosen = np.concatenate([np.ones(1), factors.cumprod()])
    if size > 1:
        bounds = [(0.0, 1.0)] * (size - 1)
        found = minimize(_log_mean_square, chosen[1:], args=(steps,), jac=True, method="L-BFGS-B", bounds=bounds)
        chosen = np.array([1.0, *found.x])
    return _bounded(chosen)


def noise_of_sums(chosen: Sequence[float], steps: int) -> Values:
    """Standard deviation of the noise in the sum over the first 1, 2, ..., `steps` estimates, float64 (steps,).

    In units of the noise of one y; sqrt(1), sqrt(2), ... without correlation.
    """
    return np.sqrt(np.cumsum(_response(np.asarray(chosen), steps) ** 2))


def noise_factor(band: int, steps: int) -> float:
    """Noise in the sum over all steps, relative to independent noise of the same noise multiplier; 1 for band 1."""
    return 1.0 if band == 1 else float(noise_of_sums(coefficients(band, steps), steps)[-1]) / math.sqrt(steps)


def _response(chosen: Values, steps: int) -> Values:
    """What one unit of noise in y_0 adds to the sums of the first 1, 2, ... estimates."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    response: Values = lfilter([1.0], np.convolve(chosen, [1.0, -1.0]), impulse)
    return response


def _log_mean_square(rest: Values, steps: int) -> tuple[float, Values]:
    """Logarithm of the mean squared noise of sums for c = (1, rest) over its norm, and the gradient."""
    chosen = np.concatenate([[1.0], rest])
    response = _response(chosen, steps)
    # the noise of y_i is in all sums from the i-th on
    weighted = (1 - np.arange(steps) / steps) * response
    mean, square = float(weighted @ response), float(chosen @ chosen)
    # the derivative of the response by c_j is minus this one, j steps later
    change = lfilter([1.0], chosen, response)
    slopes = [-2 * float(weighted[j:] @ change[: steps - j]) for j in range(1, len(chosen))]
    return math.log(mean) + math.log(square), np.array(slopes) / mean + 2 * rest / square


def _bounded(chosen: Values) -> tuple[float, ...]:
    """Scaled to norm 1, or less by a rounding error."""
    scale = 1 / math.sqrt(math.fsum(chosen**2))
    while True:
        scaled = tuple(float(c) * scale for c in chosen)
        if sum(Fraction(c) ** 2 for c in scaled) <= 1:
            return scaled
        scale = math.nextafter(scale, 0.0)
