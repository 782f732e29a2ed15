"""Epsilon beside the progress bar: what a second accountant finds for the steps taken, when there is time for it."""

from __future__ import annotations

import re

import pytest
from tests_support import Clock

from rapid.dp import DpSgdSpec, QuerySpec, calibrate, progress
from rapid.dp.accounting import pld_epsilon
from rapid.dp.budget import Budget
from rapid.dp.progress import EpsilonSoFar

SIZE = 1000


def budget_of(steps: int = 60) -> Budget:
    specs = [
        QuerySpec(name="count", kind="count", share=0.1, dataset_size=SIZE),
        DpSgdSpec(name="probe", share=0.3, dataset_size=SIZE, expected_batch=SIZE, steps=10, clip_norm=1.0),
        DpSgdSpec(name="denoiser", dataset_size=SIZE, expected_batch=50, steps=steps, clip_norm=1.0),
    ]
    return calibrate(specs, epsilon=2.0, delta=1e-5)


BUDGET = budget_of()


def number(words: str | None) -> float:
    assert words is not None
    found = re.fullmatch(r"epsilon ([0-9.]+)", words)
    assert found
    return float(found[1])


@pytest.mark.parametrize(
    ("name", "steps"), [("probe", 5), ("probe", 10), ("denoiser", 3), ("denoiser", 30), ("denoiser", 60)]
)
def test_it_is_that_of_the_steps_taken_and_of_what_came_before(name: str, steps: int) -> None:
    told = number(EpsilonSoFar(BUDGET).note(BUDGET.release(name), steps))
    before = {"count": 1} | ({"probe": 10} if name == "denoiser" else {})
    expected = pld_epsilon(BUDGET.events(before | {name: steps}), BUDGET.delta)
    # two digits after the point, rounded up, and the grids of two accountants
    assert expected - 0.01 <= told <= 1.02 * expected + 0.02


def test_the_last_step_tells_what_the_model_says() -> None:
    told = number(EpsilonSoFar(BUDGET).note(BUDGET.main, 60))
    assert BUDGET.spent <= told <= BUDGET.spent + 0.01


@pytest.mark.parametrize("steps", [1, 2, 19, 41, 47])
def test_the_first_places_and_the_end_are_told(steps: int) -> None:
    """Steps that take no time are over before there is time for more than that."""
    budget = budget_of(steps)
    spent = EpsilonSoFar(budget)
    told = [step for step in range(1, steps + 1) if spent.note(budget.main, step) is not None]
    assert told == sorted({max(1, steps // 20), steps})


def test_slow_steps_are_told_twenty_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, progress)
    spent, told = EpsilonSoFar(BUDGET), []
    for step in range(1, 61):
        clock.now += 3600
        if spent.note(BUDGET.main, step) is not None:
            told.append(step)
    assert told == list(range(3, 61, 3))
