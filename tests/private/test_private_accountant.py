"""Accounting against published figures and an independent numerical accountant (the vectors' PLD column)."""

from __future__ import annotations

import math

import pytest

from rapid.errors import InputError
from rapid.private.accountant import prv_epsilon, rdp_epsilon, solve_noise_multiplier
from rapid.private.plan import Plan, default_delta

# sample_rate, noise_multiplier, steps, delta, RDP, PLD
VECTORS = [
    (1 / 15, 2.48779, 4500, 1e-5, 9.996, 9.292),
    (1 / 15, 18.28125, 4500, 1e-5, 0.991, 0.907),
    (1 / 15, 82.5, 4500, 1e-5, 0.1955, 0.1750),
    (1 / 80, 1.30371, 24000, 1e-6, 9.990, 9.368),
    (1 / 118, 2.0, 174000, 1e-5, 9.995, 9.307),
    (1 / 118, 14.0, 165000, 1e-5, 0.996, 0.912),
    (1 / 90, 4.0, 385000, 1e-6, 9.984, 9.381),
    (0.0683, 2.0, 732, 1e-5, 4.823, 4.436),
    (0.0205, 1.0, 1464, 1e-5, 5.369, 4.881),
    (0.0256, 0.8, 976, 1e-6, 10.30, 9.364),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "rdp", "pld"), VECTORS)
def test_published_vectors(rate: float, noise: float, steps: int, delta: float, rdp: float, pld: float) -> None:
    assert rdp_epsilon(noise, rate, steps, delta) == pytest.approx(rdp, rel=5e-3)
    # an upper bound on what PLD bounds too, within the 0.02 of the two numerical errors
    assert prv_epsilon(noise, rate, steps, delta) == pytest.approx(pld, abs=0.02)


def test_without_steps_nothing_is_spent_and_without_noise_everything() -> None:
    assert prv_epsilon(1.0, 0.1, 0, 1e-5) == rdp_epsilon(1.0, 0.1, 0, 1e-5) == 0
    assert prv_epsilon(0.0, 0.1, 1, 1e-5) == rdp_epsilon(0.0, 0.1, 1, 1e-5) == math.inf


def test_epsilon_rises_with_steps_and_rate_and_falls_with_noise() -> None:
    base = prv_epsilon(1.5, 0.05, 200, 1e-5)
    assert prv_epsilon(1.5, 0.05, 400, 1e-5) > base
    assert prv_epsilon(1.5, 0.1, 200, 1e-5) > base
    assert prv_epsilon(2.5, 0.05, 200, 1e-5) < base


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_the_solved_noise_spends_the_budget_and_not_more(epsilon: float) -> None:
    noise = solve_noise_multiplier(epsilon, 1e-5, 0.05, 300)
    spent = prv_epsilon(noise, 0.05, 300, 1e-5)
    assert 0.98 * epsilon <= spent <= epsilon


def test_full_batches_are_the_gaussian_mechanism() -> None:
    """One step of rate 1: the analytic Gaussian mechanism (Balle and Wang 2018) in closed form."""
    noise, epsilon = 2.0, prv_epsilon(2.0, 1.0, 1, 1e-5)

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    a, b = 1 / (2 * noise), epsilon * noise
    delta = phi(a - b) - math.exp(epsilon) * phi(-a - b)
    assert delta <= 1e-5
    shorter = epsilon - 0.03
    assert phi(a - shorter * noise) - math.exp(shorter) * phi(-a - shorter * noise) > 1e-5


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"epsilon": 0.0}, "--epsilon"),
        ({"epsilon": -1.0}, "--epsilon"),
        ({"epsilon": math.nan}, "--epsilon"),
        ({"epsilon": math.inf}, "--epsilon"),
        ({"delta": 0.0}, "--delta"),
        ({"delta": 1.0}, "--delta"),
        ({"expected_batch": 101}, "expected_batch"),
    ],
)
def test_bad_plans_name_the_argument(change: dict[str, float], argument: str) -> None:
    good = {"epsilon": 1.0, "delta": 1e-3, "dataset_size": 100, "expected_batch": 10, "steps": 5, "clip_norm": 1.0}
    with pytest.raises(InputError, match=argument):
        Plan.solve(**(good | change))


def test_default_delta() -> None:
    assert default_delta(60_000) == pytest.approx(1 / (60_000 * math.log(60_000)))
    assert all(0 < default_delta(n) < 1 / n for n in (1, 2, 3, 100))
