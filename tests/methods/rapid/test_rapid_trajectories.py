"""Images at different steps in one batch, against the generator that takes all steps together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rapid.bundle.format import Bundle
from rapid.methods.rapid.generator import Generator, streams
from rapid.methods.rapid.trajectories import Trajectories

CPU = torch.device("cpu")


def make(path: Path, **changes: object) -> Generator:
    """One candidate for each image, so that images can be compared one by one; larger weights, so that they differ."""
    bundle = Bundle.open(path, "-")
    given_settings = bundle.settings.generation.model_copy(update={"attempts": 1, **changes})
    private = bundle.settings.private.model_copy(update={"neighbours": 3})
    changed = bundle.config.model_copy(
        update={"settings": bundle.settings.model_copy(update={"private": private, "generation": given_settings})}
    )
    return Generator(Bundle(bundle.path, changed, bundle.privacy), CPU, given_settings)


@pytest.fixture(
    scope="module",
    params=[
        {"sampler": "ddim", "steps": 20},
        {"sampler": "pndm", "steps": 20, "guidance": 2.0},
        {"sampler": "dpm-solver++", "steps": 10, "epsilon_scale": 1.1},
        {"sampler": "ddim", "steps": 10, "retrieval": "none"},
        {"sampler": "ddim", "steps": 10, "retrieval": "class"},
    ],
    ids=["query", "pndm", "dpm", "none", "class"],
)
def generator(request: pytest.FixtureRequest, private_bundle: Path) -> Generator:
    return make(private_bundle, **request.param)


def alone(
    generator: Generator, seed: int, numbers: NDArray[np.int64], labels: NDArray[np.int64], steps: int | None = None
) -> NDArray[np.uint8]:
    route = generator.route(steps)
    start = generator.start(streams(seed, numbers), labels, route)
    return generator.decode(generator.finish(start.x, labels, route))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_else_is_in_the_batch_changes_nothing(generator: Generator, data: st.DataObject) -> None:
    trajectories = Trajectories(generator)
    seed = data.draw(st.integers(0, 2**40))
    labels = np.arange(40) % 10
    begun: dict[int, int] = {}
    made: dict[int, NDArray[np.uint8]] = {}
    entries: dict[int, int] = {}
    dropped = set()
    number = 0
    # odd ones are made in other steps
    steps = [None, data.draw(st.sampled_from([1, 4, 13]), label="steps")]
    left = [generator.route(steps[number % 2]).calls for number in range(12)]
    while number < 12 or begun:
        if number < 12 and (more := data.draw(st.integers(0 if begun else 1, 4), label="more")):
            numbers = np.arange(number, min(12, number + more))
            for odd in (0, 1):
                some = numbers[numbers % 2 == odd]
                rows = trajectories.begin(seed, some, labels[some], steps[odd])
                begun |= dict(zip(rows.tolist(), some.tolist(), strict=True))
            number += len(numbers)
        waiting = sorted(begun)
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True), label="rows")
        found = trajectories.advance(np.array(chosen))
        for row in chosen:
            left[begun[row]] -= 1
        assert sorted(found.rows.tolist()) == sorted(row for row in chosen if not left[begun[row]])
        images = generator.decode(found.latents) if len(found.rows) else ()
        for row, image, entry in zip(found.rows.tolist(), images, found.entries.tolist(), strict=True):
            made[begun[row]], entries[begun[row]] = image, entry
            del begun[row]
        if len(begun) > 6 and data.draw(st.booleans(), label="drop"):
            row = min(begun)
            trajectories.drop(np.array([row]))
            dropped.add(begun.pop(row))
    assert set(made) | dropped == set(range(12))
    numbers = np.array(sorted(made))
    for which in numbers.tolist():
        number = np.array([which])
        expected = alone(generator, seed, number, labels[number], steps[which % 2]).astype(int)
        assert np.abs(made[which] - expected[0]).max() <= 1
    # the same start, however many steps lead on from it; but a query is made in steps
    numbers = numbers[numbers % 2 == 0] if generator.route().early is not None else numbers
    if not len(numbers):
        return
    retrieved = generator.start(streams(seed, numbers), labels[numbers]).retrieved
    found_entries = [entries[which] for which in numbers.tolist()]
    assert found_entries == ([-1] * len(numbers) if retrieved is None else retrieved.indices.tolist())


def test_nothing_to_do(generator: Generator) -> None:
    trajectories = Trajectories(generator)
    assert len(trajectories.begin(0, np.arange(0), np.arange(0))) == 0


def test_a_row_that_was_not_finite_leaves_nothing_behind(private_bundle: Path) -> None:
    generator = make(private_bundle, sampler="ddim", steps=10, retrieval="class")
    trajectories = Trajectories(generator)
    labels = np.array([3])
    row = trajectories.begin(1, np.array([0]), labels)
    trajectories._x[torch.from_numpy(row)] = torch.nan
    trajectories.advance(row)
    trajectories.drop(row)
    rows = trajectories.begin(2, np.arange(32), np.repeat(labels, 32))
    assert row[0] in rows
    while not len((arrived := trajectories.advance(rows)).rows):
        pass
    expected = alone(generator, 2, np.arange(32), np.repeat(labels, 32)).astype(int)
    assert np.abs(generator.decode(arrived.latents) - expected).max() <= 1
