"""Events: what the functions build, round trips through JSON, flattening to rows."""

from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from rapid.dp.events import (
    compose,
    dp_sgd_event,
    event_from_json,
    event_to_json,
    gaussian_event,
    poisson_gaussian_steps,
)

noises = st.floats(0, 1e5)
rates = st.floats(0, 1)
gaussians = st.builds(GaussianDpEvent, noises)
leaves = st.one_of(st.just(NoOpDpEvent()), gaussians, st.builds(PoissonSampledDpEvent, rates, gaussians))
trees = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.builds(SelfComposedDpEvent, parts, st.integers(0, 5)),
        st.builds(ComposedDpEvent, st.lists(parts, max_size=4)),
    ),
    max_leaves=8,
)


def expanded(event: DpEvent) -> list[tuple[float, float]]:
    """(noise multiplier, sample rate) of every single release in the tree, one after the other."""
    match event:
        case NoOpDpEvent():
            return []
        case GaussianDpEvent():
            return [(event.noise_multiplier, 1.0)]
        case PoissonSampledDpEvent():
            return [(event.event.noise_multiplier, event.sampling_probability)]
        case SelfComposedDpEvent():
            return expanded(event.event) * event.count
    return [release for part in event.events for release in expanded(part)]


def test_what_the_functions_build() -> None:
    step = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))
    assert gaussian_event(2.0) == GaussianDpEvent(2.0)
    assert dp_sgd_event(2.0, 0.1, 7) == SelfComposedDpEvent(step, 7)
    assert dp_sgd_event(2.0, 0.1, 0) == compose([]) == compose([NoOpDpEvent()]) == NoOpDpEvent()
    assert compose([step]) == compose([NoOpDpEvent(), step]) == step
    assert compose([step, gaussian_event(3.0)]) == ComposedDpEvent([step, GaussianDpEvent(3.0)])


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_a_noise_multiplier_out_of_range(noise: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        gaussian_event(noise)


@pytest.mark.parametrize(("rate", "steps", "name"), [(1.1, 1, "rate"), (-0.1, 1, "rate"), (0.1, -1, "steps")])
def test_steps_out_of_range(rate: float, steps: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        dp_sgd_event(1.0, rate, steps)


@given(event=trees)
def test_events_come_back_from_json_as_they_were(event: DpEvent) -> None:
    text = json.dumps(event_to_json(event), allow_nan=False)
    assert event_from_json(json.loads(text)) == event


@given(noise=noises, rate=st.just(1.0) | rates, steps=st.just(1) | st.integers(0, 10**6))
def test_rows_of_old_ledgers(noise: float, rate: float, steps: int) -> None:
    rows = poisson_gaussian_steps(event_from_json([noise, rate, steps]))
    assert rows == ([(noise, rate, steps)] if rate and steps else [])
    assert event_from_json([noise, 1.0, 1]) == GaussianDpEvent(noise)


@given(event=trees)
def test_rows_are_all_releases_of_the_tree(event: DpEvent) -> None:
    rows = poisson_gaussian_steps(event)
    found = [(noise, rate) for noise, rate, steps in rows for _ in range(steps)]
    # the repetition of a composition is ordered by its parts; order has no part in composition
    assert sorted(found) == sorted(release for release in expanded(event) if release[1] > 0)


@given(parts=st.lists(trees, max_size=4))
def test_a_composition_has_the_rows_of_its_parts(parts: list[DpEvent]) -> None:
    assert poisson_gaussian_steps(compose(parts)) == [row for part in parts for row in poisson_gaussian_steps(part)]


@given(event=trees)
def test_other_accountants_take_the_events(event: DpEvent) -> None:
    assert dp_accounting.pld.PLDAccountant().supports(event)


@pytest.mark.parametrize(
    "data",
    [
        {"type": "LaplaceDpEvent", "noise_multiplier": 1.0},
        {"type": "GaussianDpEvent"},
        {"type": "GaussianDpEvent", "noise_multiplier": 1.0, "sensitivity": 2.0},
        {"type": "NoOpDpEvent", "count": 1},
        {"noise_multiplier": 1.0},
        {},
    ],
)
def test_other_objects_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=repr(data.get("type"))):
        event_from_json(data)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"type": "GaussianDpEvent", "noise_multiplier": "1"}, "noise_multiplier"),
        ({"type": "GaussianDpEvent", "noise_multiplier": True}, "noise_multiplier"),
        ({"type": "PoissonSampledDpEvent", "sampling_probability": 2, "event": [1.0, 1, 1]}, "sampling_probability"),
        ({"type": "SelfComposedDpEvent", "event": [1.0, 1, 1], "count": 1.5}, "count"),
        ({"type": "ComposedDpEvent", "events": 3}, "ComposedDpEvent"),
        ({"type": "ComposedDpEvent", "events": [3]}, "3"),
        ([1.0, 0.1], "steps"),
        ([1.0, 0.1, -2], "steps"),
        ("GaussianDpEvent", "GaussianDpEvent"),
        (None, "None"),
    ],
)
def test_damaged_events_are_refused_by_name(data: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        event_from_json(data)


def test_events_that_rapid_does_not_release_are_refused_by_name() -> None:
    for event in (
        LaplaceDpEvent(1.0),
        NonPrivateDpEvent(),
        ComposedDpEvent([LaplaceDpEvent(1.0), NonPrivateDpEvent()]),
    ):
        with pytest.raises(ValueError, match=r"LaplaceDpEvent|NonPrivateDpEvent"):
            event_to_json(event)
        with pytest.raises(ValueError, match=r"LaplaceDpEvent|NonPrivateDpEvent"):
            poisson_gaussian_steps(event)
    # several releases of one sample are no steps of DP-SGD
    sampled = PoissonSampledDpEvent(0.1, SelfComposedDpEvent(GaussianDpEvent(1.0), 2))
    with pytest.raises(ValueError, match="PoissonSampledDpEvent of SelfComposedDpEvent"):
        poisson_gaussian_steps(sampled)
