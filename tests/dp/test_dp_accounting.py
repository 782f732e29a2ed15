"""Accounting against published figures and an independent numerical accountant (the vectors' PLD column)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import optimize, stats

from rapid.bundle.card import privacy_in_words
from rapid.config.sections import PrivateSettings
from rapid.dp.accounting import Release, group_epsilon, prv_epsilon, rdp_epsilon, solve_noise_multiplier
from rapid.dp.budget import Budget
from rapid.dp.releases import Plan, default_delta
from rapid.dp.statement import privacy_statement
from rapid.errors import InputError

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
    assert rdp_epsilon([Release(noise, rate, steps)], delta) == pytest.approx(rdp, rel=5e-3)
    # an upper bound on what PLD bounds too, within the 0.02 of the two numerical errors
    assert prv_epsilon([Release(noise, rate, steps)], delta) == pytest.approx(pld, abs=0.02)


def test_without_steps_nothing_is_spent_and_without_noise_everything() -> None:
    assert prv_epsilon([Release(1.0, 0.1, 0)], 1e-5) == rdp_epsilon([Release(1.0, 0.1, 0)], 1e-5) == 0
    assert prv_epsilon([Release(0.0, 0.1, 1)], 1e-5) == rdp_epsilon([Release(0.0, 0.1, 1)], 1e-5) == math.inf


def test_epsilon_rises_with_steps_and_rate_and_falls_with_noise() -> None:
    base = prv_epsilon([Release(1.5, 0.05, 200)], 1e-5)
    assert prv_epsilon([Release(1.5, 0.05, 400)], 1e-5) > base
    assert prv_epsilon([Release(1.5, 0.1, 200)], 1e-5) > base
    assert prv_epsilon([Release(2.5, 0.05, 200)], 1e-5) < base


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_the_solved_noise_spends_the_budget_and_not_more(epsilon: float) -> None:
    noise = solve_noise_multiplier(epsilon, 1e-5, 0.05, 300)
    spent = prv_epsilon([Release(noise, 0.05, 300)], 1e-5)
    assert 0.98 * epsilon <= spent <= epsilon


def test_full_batches_are_the_gaussian_mechanism() -> None:
    """One step of rate 1: the analytic Gaussian mechanism (Balle and Wang 2018) in closed form."""
    noise, epsilon = 2.0, prv_epsilon([Release(2.0, 1.0, 1)], 1e-5)

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


def test_prv_lies_above_another_librarys_privacy_loss_distribution() -> None:
    """dp-accounting's PLD, which is an upper bound too: both are within their numerical errors of the truth."""
    for noise, rate, steps in ((4.16, 0.034, 800), (1.0, 0.02, 500)):
        loss = privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=1e-4
        ).self_compose(steps)
        assert prv_epsilon([Release(noise, rate, steps)], 1e-5) == pytest.approx(
            loss.get_epsilon_for_delta(1e-5), abs=0.03
        )


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("noise", [3.0, 10.0])
def test_a_group_at_full_batches_is_one_gaussian_with_its_shift(size: int, noise: float) -> None:
    """Rate 1, one step: m images move the sum by m clip norms; analytic Gaussian (Balle and Wang 2018)."""
    delta, sigma = 1e-5, noise / size

    def spends(epsilon: float) -> float:
        return stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
            -0.5 / sigma - epsilon * sigma
        )

    exact = optimize.brentq(lambda epsilon: spends(epsilon) - delta, 0, 100)
    assert group_epsilon([Release(noise, 1.0, 1)], delta, size) == pytest.approx(exact, rel=0.01, abs=0.01)


@pytest.mark.parametrize(("noise", "rate", "size"), [(1.0, 0.1, 3), (2.0, 0.3, 2), (0.8, 0.01, 4)])
def test_a_group_in_one_step_by_integration(noise: float, rate: float, size: int) -> None:
    """The hockey-stick divergence of the mixture of Gaussians, by quadrature, in both directions."""
    delta = 1e-4
    shifts = np.arange(size + 1)
    weights = stats.binom.pmf(shifts, size, rate)
    x = np.linspace(-12 * noise, size + 12 * noise, 400_001)
    with_group = (weights[:, None] * stats.norm.pdf(x, shifts[:, None], noise)).sum(0)
    without = stats.norm.pdf(x, 0, noise)

    def spends(epsilon: float) -> float:
        factor = math.exp(epsilon)
        add, remove = np.maximum(with_group - factor * without, 0), np.maximum(without - factor * with_group, 0)
        return max(float(np.trapezoid(add, x)), float(np.trapezoid(remove, x)))

    exact = optimize.brentq(lambda epsilon: spends(epsilon) - delta, 1e-6, 60)
    found = group_epsilon([Release(noise, rate, 1)], delta, size)
    assert exact <= found * (1 + 1e-6) <= exact * 1.01 + 0.011


def test_groups_spend_more_than_one_and_less_than_the_textbook_says() -> None:
    one = group_epsilon([Release(4.0, 0.03, 500)], 1e-6, 1)
    assert one == prv_epsilon([Release(4.0, 0.03, 500)], 1e-6)
    two, three = (group_epsilon([Release(4.0, 0.03, 500)], 1e-6, size) for size in (2, 3))
    assert one < two < three
    # m epsilon holds only at a delta that is e^((m - 1) epsilon) times larger
    textbook = 2 * prv_epsilon([Release(4.0, 0.03, 500)], 1e-6 / (1 + math.exp(one)))
    assert two < textbook


def test_epsilon_is_never_negative_and_can_be_solved_for_small_sets() -> None:
    assert prv_epsilon([Release(4.0, 0.1, 1)], 0.1) >= 0
    noise = solve_noise_multiplier(1.0, 0.043, 0.1, 1)
    assert prv_epsilon([Release(noise, 0.1, 1)], 0.043) <= 1


@pytest.mark.parametrize("size", [1, 3])
def test_releases_compose(size: int) -> None:
    """Two Gaussian releases are one with the sum of their squared inverse noises; nothing is the neutral element."""
    both = [Release(4.0, 1.0, 1), Release(5.0, 1.0, 2)]
    noise = (1 / 16 + 2 / 25) ** -0.5
    one = group_epsilon([Release(noise, 1.0, 1)], 1e-5, size)
    assert group_epsilon(both, 1e-5, size) == pytest.approx(one, abs=0.02)
    assert group_epsilon([*both, Release(0.1, 1.0, 0)], 1e-5, size) == group_epsilon(both, 1e-5, size)
    assert prv_epsilon([], 1e-5) == rdp_epsilon([], 1e-5) == group_epsilon([], 1e-5, size) == 0


def test_subsampled_steps_and_a_gaussian_release_compose_as_in_another_library() -> None:
    steps, single = Release(2.0, 0.02, 150), Release(20.0, 1.0, 1)
    losses = [
        privacy_loss_distribution.from_gaussian_mechanism(
            release.noise_multiplier, sampling_prob=release.sample_rate, value_discretization_interval=1e-4
        ).self_compose(release.steps)
        for release in (steps, single)
    ]
    expected = losses[0].compose(losses[1]).get_epsilon_for_delta(1e-6)
    assert prv_epsilon([steps, single], 1e-6) == pytest.approx(expected, abs=0.02)
    assert prv_epsilon([single, steps], 1e-6) == pytest.approx(expected, abs=0.02)
    noise = solve_noise_multiplier(1.0, 1e-6, 0.02, 150, [single])
    assert 0.98 <= prv_epsilon([Release(noise, 0.02, 150), single], 1e-6) <= 1
    assert noise > solve_noise_multiplier(1.0, 1e-6, 0.02, 150)


def test_large_groups_can_be_computed() -> None:
    assert group_epsilon([Release(50.0, 0.001, 10)], 1e-6, 1100) > group_epsilon([Release(50.0, 0.001, 10)], 1e-6, 100)


def test_a_plan_tells_its_group_and_its_work() -> None:
    plan = Plan(
        dataset_size=1000, expected_batch=100, steps=50, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5,
        multiplicity=4, group_size=3,
    )  # fmt: skip
    assert plan.epsilon_group() == group_epsilon([Release(2.0, 0.1, 50)], 1e-5, 3) > plan.epsilon()
    assert plan.gradient_computations() == 100 * 50 * 4
    # 100 agreeing gradients of norm C against sqrt(parameters) * sigma * C
    assert plan.signal_to_noise(2500) == pytest.approx(100 / (2 * 50))
    budget = Budget(None, None, plan)
    statement = privacy_statement(budget, PrivateSettings(noise_source="device", optimizer="momentum"))
    assert statement["group"]["size"] == 3
    assert statement["group"]["epsilon"] == pytest.approx(plan.epsilon_group(), abs=1e-5)
    assert "dp-accounting" in statement["group"]["accountant"]
    assert statement["mechanism"].endswith("gradient descent with momentum")
    assert "not cryptographic" in statement["noise_source"]
    assert "a person with 3 images" in privacy_in_words(statement | {"dataset_size": 1000})
    alone = Budget(None, None, plan.model_copy(update={"group_size": 1}))
    assert "group" not in privacy_statement(alone, PrivateSettings())
