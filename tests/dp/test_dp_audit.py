"""The audit against the published bound's own definition, and against mechanisms that are broken on purpose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rapid.dp.audit import Audit, audit, best_bound, epsilon_bound, guess_probability
from rapid.dp.mechanism import PrivateMechanism
from rapid.errors import InputError
from rapid.methods import load_settings
from rapid.methods.rapid.settings import RapidSettings

EPSILON, DELTA = 2.0, 1e-5


@pytest.fixture(scope="module")
def small() -> RapidSettings:
    settings = load_settings("demo", ["denoiser.channels=16", "denoiser.heads=2"])
    assert isinstance(settings, RapidSettings)
    return settings


@given(st.integers(1, 60), st.floats(0, 6), st.data())
def test_the_probability_is_that_of_the_theorem(guesses: int, epsilon: float, data: st.DataObject) -> None:
    """Term by term with exact binomial coefficients."""
    right = data.draw(st.integers(0, guesses))
    canaries = data.draw(st.integers(guesses, 200))
    delta = data.draw(st.sampled_from([0.0, 1e-6, 1e-3]))
    p = math.exp(epsilon) / (1 + math.exp(epsilon))

    def tail(least: int) -> float:
        return sum(math.comb(guesses, k) * p**k * (1 - p) ** (guesses - k) for k in range(max(0, least), guesses + 1))

    slope = max((tail(right - i) - tail(right)) / i for i in range(1, right + 1)) if right else 0.0
    expected = min(1.0, tail(right) + 2 * canaries * delta * max(0.0, slope))
    assert guess_probability(canaries, guesses, right, epsilon, delta) == pytest.approx(expected, abs=1e-9)


def test_the_bound_is_where_the_probability_crosses() -> None:
    bound = epsilon_bound(1000, 100, 90, 1e-5, 0.95)
    assert guess_probability(1000, 100, 90, bound, 1e-5) == pytest.approx(0.05, abs=1e-4)
    # more right guesses, more confidence asked for, more delta
    assert epsilon_bound(1000, 100, 95, 1e-5, 0.95) > bound > epsilon_bound(1000, 100, 90, 1e-5, 0.99)
    assert epsilon_bound(1000, 100, 90, 1e-3, 0.95) < bound
    assert epsilon_bound(1000, 100, 50, 1e-5, 0.95) == 0
    # without delta all of r right guesses have probability p^r
    p = 0.05 ** (1 / 100)
    assert epsilon_bound(1000, 100, 100, 0.0, 0.95) == pytest.approx(math.log(p / (1 - p)), abs=1e-4)


def test_the_bound_holds_for_randomised_response() -> None:
    """The mechanism whose epsilon is known exactly: too high a bound is as rare as it should be, and it is not idle."""
    rng = np.random.default_rng(0)
    chance = 1 / (1 + math.exp(-1.0))
    bounds = []
    for _ in range(300):
        coins = rng.random(400) < 0.5
        seen = np.where(rng.random(400) < chance, coins, ~coins)
        # ties are broken at random
        bounds.append(best_bound(coins, seen + 0.1 * rng.random(400), 0.0, 0.95)[2])
    assert np.mean(np.array(bounds) > 1.0) <= 0.07
    assert np.mean(bounds) > 0.5


class NoNoise(PrivateMechanism):
    def _add_noise(self, total: Tensor) -> None:
        pass


class TenthOfNoise(PrivateMechanism):
    def _add_noise(self, total: Tensor) -> None:
        noise = torch.zeros_like(total)
        super()._add_noise(noise)
        total += noise / 10


class NoClipping(PrivateMechanism):
    def _clipped_sum(self, indices: Tensor) -> Tensor:
        spec = self._spec
        self._spec = spec.model_copy(update={"clip_norm": 1e9})
        total = super()._clipped_sum(indices)
        self._spec = spec
        return total


class EveryoneInEveryBatch(PrivateMechanism):
    """What the accountant was told of is a sample."""

    def _draw_batch(self) -> Tensor:
        return torch.arange(self._spec.dataset_size)


class InTurn(PrivateMechanism):
    """Batches in the order of the file, as a data loader makes them, accounted for as if they were Poisson samples."""

    def _draw_batch(self) -> Tensor:
        size = self._spec.expected_batch
        place = (self.steps_taken - 1) % (self._spec.dataset_size // size)
        return torch.arange(place * size, (place + 1) * size)


def play(settings: RapidSettings, mechanism: type[PrivateMechanism], **changes: Any) -> Audit:
    arguments = {"epsilon": EPSILON, "delta": DELTA, "canaries": 600, "steps": 24, **changes}
    return audit(settings, build=mechanism, **arguments)


def test_the_true_mechanism_is_not_refuted(small: RapidSettings) -> None:
    found = play(small, PrivateMechanism, canaries=1000, sample_rate=0.5)
    assert not found.refuted
    assert found.bound <= EPSILON
    # it is far from it, because coins are guessed little better than by chance; yet they are
    assert found.right > found.guesses / 2


@pytest.mark.parametrize(
    ("broken", "sample_rate"),
    # at a rate of 0.25 one audit in a hundred cannot tell that everybody is in every batch
    [(NoNoise, 0.25), (TenthOfNoise, 0.25), (NoClipping, 0.25), (EveryoneInEveryBatch, 0.05)],
)
def test_broken_mechanisms_are_refuted(
    small: RapidSettings, broken: type[PrivateMechanism], sample_rate: float
) -> None:
    found = play(small, broken, sample_rate=sample_rate)
    assert found.refuted
    assert found.bound > EPSILON


def test_batches_without_poisson_sampling_are_refuted(small: RapidSettings) -> None:
    """Whoever knows the order of the file knows in which batch an image would be."""

    def batches(step: int) -> Tensor:
        return (torch.arange(2000) // 40 == step).double()

    found = play(small, InTurn, epsilon=1.0, steps=50, sample_rate=0.02, canaries=2000, batches=batches)
    assert found.refuted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canaries": 10}, "canaries 10"),
        ({"steps": 0}, "steps 0"),
        ({"confidence": 1.0}, "confidence 1.0"),
        ({"sample_rate": 0.0}, "sample_rate 0.0"),
        ({"epsilon": -1.0}, "epsilon -1.0"),
    ],
)
def test_bad_arguments(small: RapidSettings, changes: dict[str, float], words: str) -> None:
    arguments = {"epsilon": 1.0, "delta": 1e-5, **changes}
    with pytest.raises(InputError, match=words):
        audit(small, **arguments)
