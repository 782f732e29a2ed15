"""RAPID's candidates at different steps in one batch, against candidates that take all steps together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rapid_variants import make, with_private
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.methods.rapid.generator import RapidGenerator
from rapid.sampling.streams import make_streams


@pytest.fixture(
    scope="module",
    params=[
        {"sampler": "ddim", "steps": 20},
        {"sampler": "pndm", "steps": 20, "guidance": 2.0},
        {"sampler": "dpm-solver++", "steps": 20, "epsilon_scale": 1.1, "public_below": 101},
        {"sampler": "ddim", "steps": 10, "retrieval": "none"},
        {"sampler": "ddim", "steps": 10, "retrieval": "class"},
    ],
    ids=["query", "pndm", "dpm", "none", "class"],
)
def generator(request: pytest.FixtureRequest, private: Bundle) -> RapidGenerator:
    """One candidate per image, so that images can be compared one by one."""
    return make(with_private(private, neighbours=3), attempts=1, **request.param)


def alone(
    generator: RapidGenerator,
    seed: int,
    numbers: NDArray[np.int64],
    labels: NDArray[np.int64],
    steps: int | None = None,
) -> NDArray[np.uint8]:
    return generator.decode(generator.sample(make_streams(seed, numbers), labels, steps)[1])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_rest_of_the_batch_changes_nothing(generator: RapidGenerator, data: st.DataObject) -> None:
    trajectories = generator.trajectories()
    seed = data.draw(st.integers(0, 2**40))
    labels = np.arange(40) % 10
    begun: dict[int, int] = {}
    made: dict[int, NDArray[np.uint8]] = {}
    records: dict[int, int] = {}
    dropped = set()
    number = 0
    # odd candidates take another number of steps
    steps = [None, data.draw(st.sampled_from([1, 4, 13]), label="steps")]
    left = [generator.calls(steps[number % 2]) for number in range(12)]
    while number < 12 or begun:
        if number < 12 and (more := data.draw(st.integers(0 if begun else 1, 4), label="more")):
            numbers = np.arange(number, min(12, number + more))
            for odd in (0, 1):
                some = numbers[numbers % 2 == odd]
                rows = trajectories.begin(seed, some, labels[some], steps[odd])
                begun |= dict(zip(rows.tolist(), some.tolist(), strict=True))
            number += len(numbers)
        chosen = data.draw(st.lists(st.sampled_from(sorted(begun)), min_size=1, unique=True), label="rows")
        found = trajectories.advance(np.array(chosen))
        for row in chosen:
            left[begun[row]] -= 1
        assert sorted(found.rows.tolist()) == sorted(row for row in chosen if not left[begun[row]])
        images = generator.decode(found.latents) if len(found.rows) else ()
        for row, image, record in zip(found.rows.tolist(), images, found.records.tolist(), strict=True):
            made[begun[row]], records[begun[row]] = image, record
            del begun[row]
        if len(begun) > 6 and data.draw(st.booleans(), label="drop"):
            row = min(begun)
            trajectories.drop(np.array([row]))
            dropped.add(begun.pop(row))
    assert set(made) | dropped == set(range(12))
    for which in sorted(made):
        expected = alone(generator, seed, np.array([which]), labels[[which]], steps[which % 2])
        assert_same_images(made[which], expected[0])
    # a query depends on the steps that lead to it, a class record does not
    numbers = np.array([which for which in sorted(made) if which % 2 == 0 or len(generator.route()) == 1])
    if len(numbers):
        retrieved = generator.sample(make_streams(seed, numbers), labels[numbers])[0].retrieved
        expected_records = [-1] * len(numbers) if retrieved is None else retrieved.records.tolist()
        assert [records[which] for which in numbers.tolist()] == expected_records
