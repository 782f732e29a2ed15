"""Epsilon of the composed, Poisson-subsampled Gaussian mechanism, by the accountants of Opacus and dp-accounting.

Adjacency is add-or-remove-one. PRV (Gopi, Lee, Wutschitz 2021) is numerical composition, and what is reported; RDP
(Mironov, Talwar, Zhang 2019) is a looser bound by other means, reported beside it. For groups of images it is the
privacy loss distribution of the mixture of Gaussians that dominates a group's share in a step (Ganesh 2024).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import reduce
from importlib import metadata
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.stats import binom, norm

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


class Release(NamedTuple):
    """Steps of the Poisson-subsampled Gaussian mechanism; a single Gaussian release is one step at sample rate 1."""

    noise_multiplier: float
    """sigma, the noise's standard deviation over the l2 sensitivity (the clip norm)."""
    sample_rate: float
    """Probability with which each image takes part in a step, in (0, 1]."""
    steps: int


def prv_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Upper bound on epsilon at `delta` of all releases together, by numerical composition.

    Args:
        releases: what is made known of the same images, in any order; without any, epsilon is 0.
        delta: in (0, 1).

    Returns:
        epsilon; infinity if a release has no noise.
    """
    releases = _taken(releases)
    if any(release.noise_multiplier <= 0 for release in releases):
        return math.inf
    if not releases:
        return 0.0
    accountant = PRVAccountant()
    accountant.history = [tuple(release) for release in releases]
    rough = rdp_epsilon(releases, delta, orders=INTEGER_ORDERS)
    # the numerical error is part of the bound: it is kept small against epsilon itself, and not smaller than it need
    # be for large ones, where time and memory would grow without end
    error = max(1e-3, min(0.01, rough / 50), rough / 1000)
    with warnings.catch_warnings():
        # it takes a first guess from RDP, which warns when the best order is the first or last
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        bound = float(accountant.get_epsilon(delta, eps_error=error))
    return max(0.0, min(bound, rough))


def rdp_epsilon(releases: Sequence[Release], delta: float, *, orders: Sequence[float] | None = None) -> float:
    """Upper bound on epsilon at `delta` by Renyi differential privacy, over some orders; arguments as `prv_epsilon`."""
    releases = _taken(releases)
    if any(release.noise_multiplier <= 0 for release in releases):
        return math.inf
    if not releases:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [tuple(release) for release in releases]
    with warnings.catch_warnings():
        # the bound holds all the same
        warnings.simplefilter("ignore", UserWarning)
        return max(0.0, float(accountant.get_epsilon(delta, alphas=None if orders is None else list(orders))))


def group_epsilon(releases: Sequence[Release], delta: float, group_size: int) -> float:
    """Upper bound on epsilon at `delta` for adding or removing all `group_size` images of one person at once.

    Each image is drawn by itself, so j of m images meet in a step with the binomial probability, and together they move
    the sum by at most j clip norms. This is far less than the textbook's m epsilon at e^((m - 1) epsilon) delta.

    Args:
        releases: as `prv_epsilon`; sensitivities are those of one image.
        delta: in (0, 1).
        group_size: m, at least 1.
    """
    releases = _taken(releases)
    if any(release.noise_multiplier <= 0 for release in releases):
        return math.inf
    if group_size == 1 or not releases:
        return prv_epsilon(releases, delta)
    # a coarser grid is looser, never too low; a thousandth of what is expected costs little of either
    rough = rdp_epsilon(releases, delta) * group_size
    interval = min(1e-2, max(1e-4, rough * 1e-3))
    shifts = np.arange(group_size + 1)
    losses = []
    for release in releases:
        probabilities = binom.pmf(shifts, group_size, release.sample_rate)
        loss = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            release.noise_multiplier,
            [float(shift) for shift in shifts],
            list(probabilities / probabilities.sum()),
            value_discretization_interval=interval,
        )
        losses.append(loss.self_compose(release.steps))
    return float(reduce(lambda one, other: one.compose(other), losses).get_epsilon_for_delta(delta))


def _taken(releases: Sequence[Release]) -> list[Release]:
    return [release for release in releases if release.steps > 0]


def single_noise_multiplier(epsilon: float, delta: float) -> float:
    """The noise multiplier with which one Gaussian release is (epsilon, delta)-DP, in closed form.

    delta = Phi(1 / (2 s) - epsilon s) - e^epsilon Phi(-1 / (2 s) - epsilon s) for noise multiplier s (Balle and Wang
    2018). Unlike numerical composition it is good for an epsilon however small; a composition that holds the release
    is still what is to be told.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
    """

    def excess(logarithm: float) -> float:
        s = math.exp(logarithm)
        return float(norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon + norm.logcdf(-0.5 / s - epsilon * s))) - delta

    high = 0.0
    while excess(high) > 0:
        high += 1
    low = high - 1
    while excess(low) <= 0:
        low -= 1
    return math.exp(brentq(excess, low, high))


def solve_noise_multiplier(
    epsilon: float, delta: float, sample_rate: float, steps: int, others: Sequence[Release] = ()
) -> float:
    """The smallest noise multiplier, to a thousandth, whose `prv_epsilon` together with `others` is at most `epsilon`.

    Raises:
        InputError: no noise multiplier up to MAX_NOISE_MULTIPLIER is enough.
    """

    def excess(noise_multiplier: float) -> float:
        return math.log(
            max(1e-12, prv_epsilon([Release(noise_multiplier, sample_rate, steps), *others], delta)) / epsilon
        )

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
