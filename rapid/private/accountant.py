"""Epsilon of the composed, Poisson-subsampled Gaussian mechanism, by Opacus' accountants.

Adjacency is add-or-remove-one. PRV (Gopi, Lee, Wutschitz 2021) is numerical composition, and what is reported; RDP
(Mironov, Talwar, Zhang 2019) is a looser bound by other means, reported beside it.
"""

from __future__ import annotations

import math
import warnings
from importlib import metadata

from opacus.accountants import PRVAccountant, RDPAccountant

from rapid.errors import InputError

MAX_NOISE_MULTIPLIER = 1e5
MIN_NOISE_MULTIPLIER = 0.2
RELATIVE_TOLERANCE = 1e-3


def accountant_name() -> str:
    """Name and version of the accountant, for privacy statements."""
    return f"PRV (opacus {metadata.version('opacus')})"


def prv_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Upper bound on epsilon at `delta` by numerical composition; 0 for no steps, infinity without noise.

    Args:
        noise_multiplier: sigma, the noise's standard deviation in units of the clip norm.
        sample_rate: probability with which each image is in a batch.
        steps: number of steps.
        delta: in (0, 1).
    """
    if steps == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    rough = rdp_epsilon(noise_multiplier, sample_rate, steps, delta)
    # the numerical error is part of the bound: it is kept small against epsilon itself
    error = min(0.01, max(1e-3, rough / 50))
    with warnings.catch_warnings():
        # it takes a first guess from RDP, which warns when the best order is the first or last
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        bound = float(accountant.get_epsilon(delta, eps_error=error))
    return min(bound, rough)


def rdp_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Upper bound on epsilon at `delta` by Renyi differential privacy; arguments as `prv_epsilon`."""
    if steps == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    with warnings.catch_warnings():
        # the bound holds all the same
        warnings.simplefilter("ignore", UserWarning)
        return float(accountant.get_epsilon(delta))


def solve_noise_multiplier(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The smallest noise multiplier, to a thousandth, whose `prv_epsilon` is at most `epsilon`.

    Raises:
        InputError: no noise multiplier up to MAX_NOISE_MULTIPLIER is enough.
    """

    def spends(noise_multiplier: float) -> float:
        return prv_epsilon(noise_multiplier, sample_rate, steps, delta)

    high = 1.0
    while spends(high) > epsilon:
        high *= 2
        if high > MAX_NOISE_MULTIPLIER:
            raise InputError(f"--epsilon {epsilon}: too small for {steps} steps at this batch; use fewer steps")
    low = high / 2
    while low > MIN_NOISE_MULTIPLIER and spends(low) <= epsilon:
        low, high = low / 2, low
    while high / low > 1 + RELATIVE_TOLERANCE:
        middle = math.sqrt(low * high)
        if spends(middle) <= epsilon:
            high = middle
        else:
            low = middle
    return high
