"""Which claims a game of a given size can refute."""

from __future__ import annotations

import math

import pytest

from rapid.dp.audit import canaries_needed, epsilon_bound, largest_refutable


def test_a_thousand_canaries_refute_no_more_than_all_right_guesses_do() -> None:
    # without delta: all r guesses right have probability p^r, and r is at most half of the canaries
    p = (0.05 / 4) ** (1 / 500)
    assert largest_refutable(1000, 0.0, 0.95) == pytest.approx(math.log(p / (1 - p)), abs=1e-4)
    assert 4.5 < largest_refutable(1000, 1e-5, 0.95) < 4.7
    assert largest_refutable(1000, 1e-5, 0.95) >= epsilon_bound(1000, 500, 500, 1e-5, 1 - 0.05 / 4)


def test_more_canaries_refute_more_until_delta_explains_everything() -> None:
    sizes = [largest_refutable(m, 1e-6, 0.95) for m in (100, 1000, 10000)]
    assert sizes == sorted(sizes)
    assert largest_refutable(10000, 1e-3, 0.95) < largest_refutable(10000, 1e-6, 0.95)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 5.0, 6.0])
def test_so_many_canaries_are_enough_and_fewer_are_not(epsilon: float) -> None:
    needed = canaries_needed(epsilon, 1e-6, 0.95)
    assert needed is not None
    assert largest_refutable(needed, 1e-6, 0.95) > epsilon
    assert needed == 20 or largest_refutable(int(needed / 1.25), 1e-6, 0.95) < epsilon


def test_some_claims_are_beyond_every_game() -> None:
    assert canaries_needed(10.0, 1e-5, 0.95) is None
    assert canaries_needed(3.0, 0.01, 0.95) is None
