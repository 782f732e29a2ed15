"""Epsilon of the composed, Poisson-subsampled Gaussian mechanism, by the accountants of Opacus and dp-accounting.

Adjacency is add-or-remove-one. PRV (Gopi, Lee, Wutschitz 2021) is numerical composition, and what is reported; RDP
(Mironov, Talwar, Zhang 2019) is a looser bound by other means, reported beside it. For groups of images it is the
privacy loss distribution of the mixture of Gaussians that dominates a group's share in a step (Ganesh 2024).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib import metadata

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.stats import binom

from rapid.errors import InputError

MAX_NOISE_MULTIPLIER = 1e5
MIN_NOISE_MULTIPLIER = 0.2
RELATIVE_TOLERANCE = 1e-3
INTEGER_ORDERS = range(2, 64)
"""Orders whose RDP is quick to compute: for a first guess."""


def accountant_name() -> str:
    """Name and version of the accountant, for privacy statements."""
    return f"PRV (opacus {metadata.version('opacus')})"


def group_accountant_name() -> str:
    """Name and version of the accountant for groups, for privacy statements."""
    return f"PLD of a mixture of Gaussians (dp-accounting {metadata.version('dp-accounting')})"


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
    rough = rdp_epsilon(noise_multiplier, sample_rate, steps, delta, orders=INTEGER_ORDERS)
    # the numerical error is part of the bound: it is kept small against epsilon itself
    error = min(0.01, max(1e-3, rough / 50))
    with warnings.catch_warnings():
        # it takes a first guess from RDP, which warns when the best order is the first or last
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        bound = float(accountant.get_epsilon(delta, eps_error=error))
    return max(0.0, min(bound, rough))


def rdp_epsilon(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, *, orders: Sequence[float] | None = None
) -> float:
    """Upper bound on epsilon at `delta` by Renyi differential privacy, over some orders; arguments as `prv_epsilon`."""
    if steps == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    with warnings.catch_warnings():
        # the bound holds all the same
        warnings.simplefilter("ignore", UserWarning)
        return max(0.0, float(accountant.get_epsilon(delta, alphas=None if orders is None else list(orders))))


def group_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float, group_size: int) -> float:
    """Upper bound on epsilon at `delta` for adding or removing all `group_size` images of one person at once.

    Each image is drawn by itself, so j of m images meet in a step with the binomial probability, and together they move
    the sum by at most j clip norms. This is far less than the textbook's m epsilon at e^((m - 1) epsilon) delta.

    Args:
        noise_multiplier: sigma, in units of the clip norm of one image.
        sample_rate: probability with which each image is in a batch.
        steps: number of steps.
        delta: in (0, 1).
        group_size: m, at least 1.
    """
    if steps == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    if group_size == 1:
        return prv_epsilon(noise_multiplier, sample_rate, steps, delta)
    shifts = np.arange(group_size + 1)
    probabilities = binom.pmf(shifts, group_size, sample_rate)
    # a coarser grid is looser, never too low; a thousandth of what is expected costs little of either
    rough = rdp_epsilon(noise_multiplier, sample_rate, steps, delta) * group_size
    loss = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise_multiplier,
        [float(shift) for shift in shifts],
        list(probabilities / probabilities.sum()),
        value_discretization_interval=min(1e-2, max(1e-4, rough * 1e-3)),
    )
    return float(loss.self_compose(steps).get_epsilon_for_delta(delta))


def solve_noise_multiplier(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The smallest noise multiplier, to a thousandth, whose `prv_epsilon` is at most `epsilon`.

    Raises:
        InputError: no noise multiplier up to MAX_NOISE_MULTIPLIER is enough.
    """

    def excess(noise_multiplier: float) -> float:
        return math.log(max(1e-12, prv_epsilon(noise_multiplier, sample_rate, steps, delta)) / epsilon)

    high = 1.0
    while (at_high := excess(high)) > 0:
        high *= 2
        if high > MAX_NOISE_MULTIPLIER:
            raise InputError(f"--epsilon {epsilon}: too small for {steps} steps at this batch; use fewer steps")
    low, at_low = high / 2, excess(high / 2)
    while low > MIN_NOISE_MULTIPLIER and at_low <= 0:
        low, high, at_low, at_high = low / 2, low, excess(low / 2), at_low
    while high / low > 1 + RELATIVE_TOLERANCE:
        # the logarithm of epsilon is close to a line in that of the noise, so a guess from both ends is nearly right
        share = min(0.9, max(0.1, at_low / (at_low - at_high))) if at_low > at_high else 0.5
        guess = low * (high / low) ** share
        for middle in (guess * (1 - RELATIVE_TOLERANCE / 3), guess * (1 + RELATIVE_TOLERANCE / 3)):
            if low < middle < high:
                if (at_middle := excess(middle)) <= 0:
                    high, at_high = middle, at_middle
                else:
                    low, at_low = middle, at_middle
    return high
