"""From right guesses to epsilon: the bound of the one-run game, and what a game of a given size can refute.

Source: Steinke, Nasr, Jagielski: Privacy auditing with one (1) training run (NeurIPS 2023), Theorem 5.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom

SHARES = (0.05, 0.1, 0.2, 0.5)
"""Shares of the canaries that are guessed, surest first. All are tried, and the confidence is corrected for that."""
HIGHEST = 200.0
MOST_CANARIES = 1_000_000
"""Largest game that `canaries_needed` considers."""


def best_bound(
    coins: NDArray[np.bool_], scores: NDArray[np.floating], delta: float, confidence: float
) -> tuple[int, int, float]:
    """The best bound over all shares.

    Args:
        coins: which canaries took part, (m,).
        scores: the larger, the likelier that the canary took part, (m,).
        delta: of the bound.
        confidence: of the bound; the failure probability is split equally among the shares.

    Returns:
        Number of guesses, number of right guesses, and the bound.
    """
    order = np.argsort(scores, kind="stable")
    found = []
    for guesses in _guesses(len(coins)):
        half = guesses // 2
        right = int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())
        bound = epsilon_bound(len(coins), guesses, right, delta, _confidence_of_one(confidence))
        found.append((guesses, right, bound))
    return max(found, key=lambda one: one[2])


def largest_refutable(canaries: int, delta: float, confidence: float) -> float:
    """The bound if every guess is right: no claim of this epsilon or more can be refuted by a game of this size."""
    one = _confidence_of_one(confidence)
    return max(epsilon_bound(canaries, guesses, guesses, delta, one) for guesses in _guesses(canaries))


def canaries_needed(epsilon: float, delta: float, confidence: float) -> int | None:
    """The least number of canaries, to within a tenth, whose game could refute a claim; None: no number can.

    More guesses allow a higher bound, but each canary adds to what delta alone could explain, so that some claims are
    beyond every size. Sizes up to `MOST_CANARIES` are considered.
    """
    failure = 1 - _confidence_of_one(confidence)
    canaries = 20
    while canaries <= MOST_CANARIES:
        if any(guess_probability(canaries, r, r, epsilon, delta) < failure for r in _guesses(canaries)):
            return canaries
        canaries = int(1.1 * canaries)
    return None


def epsilon_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """The largest epsilon that so many right guesses refute; 0 if they refute none.

    Args:
        canaries: m, each of which took part with probability 1/2.
        guesses: r <= m.
        right: v <= r.
        delta: in [0, 1).
        confidence: 1 - p-value at which a claim counts as refuted.
    """

    def excess(epsilon: float) -> float:
        return guess_probability(canaries, guesses, right, epsilon, delta) - (1 - confidence)

    if excess(0.0) > 0:
        return 0.0
    if excess(HIGHEST) <= 0:
        return HIGHEST
    return float(brentq(excess, 0.0, HIGHEST, xtol=1e-6))


def guess_probability(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of `right` or more right guesses if the training is (epsilon, delta)-DP.

    Steinke et al., Theorem 5.2: with f(v) = P[Binomial(r, e^epsilon / (1 + e^epsilon)) >= v], it is at most
    f(v) + 2 m delta max over i in 1..v of (f(v - i) - f(v)) / i.
    """
    chance = 1 / (1 + np.exp(-epsilon))
    whole = float(binom.sf(right - 1, guesses, chance))
    steepest, done, size = 0.0, 0, 64
    # the slope at i is at most 1 / i, so later ones need not be looked at once a steeper one is found
    while done < right and steepest * (done + 1) < 1:
        i = np.arange(done + 1, min(right, done + size) + 1)
        slopes = (binom.sf(right - i - 1, guesses, chance) - whole) / i
        steepest, done, size = max(steepest, float(slopes.max())), int(i[-1]), 2 * size
    return min(1.0, whole + 2 * canaries * delta * steepest)


def _guesses(canaries: int) -> list[int]:
    """Numbers of guesses that are tried: as many for "took part" as for "did not"."""
    return [2 * max(1, round(share * canaries / 2)) for share in SHARES]


def _confidence_of_one(confidence: float) -> float:
    return 1 - (1 - confidence) / len(SHARES)
