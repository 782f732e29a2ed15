"""The images of a worker against those of `generate`, whatever other requests come and go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rapid_server.worker import QUICK_LATENTS, Worker
from tests_support import Fails, assert_same_images

from rapid.methods import open_generator
from rapid.sampling.generate import generate
from rapid.sampling.generator import Finished, Generator, Trajectories
from rapid.sampling.request import Request

Images = dict[int, NDArray[np.uint8]]


def work(worker: Worker, found: dict[Request, Images], steps: int = 10**6, hurry: bool = False) -> None:
    while worker.busy and steps:
        step = worker.step(lambda: hurry)
        steps -= 1
        assert step.rows <= worker.batch
        for request, images in step.images:
            for one in images:
                assert one.place not in found[request]
                found[request][one.place] = one.image


def check(generator: Generator, request: Request, images: Images) -> None:
    labels = None if request.labels is None else request.labels.tolist()
    expected = generate(generator, request.count, labels, request.seed).images
    assert sorted(images) == list(range(request.count))
    for place, image in images.items():
        assert_same_images(image, expected[place])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 30)),
        min_size=1,
        max_size=5,
    ),
    batch=st.integers(1, 40),
    gone=st.integers(0, 4),
    hurry=st.booleans(),
)
def test_requests_come_and_go(
    generator: Generator, requests: list[tuple[list[int], int, int]], batch: int, gone: int, hurry: bool
) -> None:
    worker = Worker(generator, batch)
    found: dict[Request, Images] = defaultdict(dict)
    taken = []
    for labels, seed, steps in requests:
        request = worker.make_request(len(labels), labels, seed)
        worker.add(request)
        worker.add(request)
        taken.append(request)
        work(worker, found, steps, hurry)
        if len(taken) == gone:
            worker.remove(taken.pop())
            worker.remove(request)
    work(worker, found, hurry=hurry)
    for request in taken:
        check(generator, request, found[request])


def test_measured(generator: Generator) -> None:
    worker = Worker(generator)
    worker.measure()
    assert worker.batch >= 1
    assert not worker.busy
    request = worker.make_request(30, seed=4)
    worker.add(request)
    found: dict[Request, Images] = defaultdict(dict)
    work(worker, found)
    check(generator, request, found[request])
    assert not worker.busy


class SlowCalls:
    """A real generator on a machine on which network calls wait, however many rows they have: so many seconds each."""

    class Rows:
        def __init__(self, rows: Trajectories, waits: Iterator[float]) -> None:
            self._rows, self._waits = rows, waits

        def __getattr__(self, name: str) -> Any:
            return getattr(self._rows, name)

        def advance(self, rows: NDArray[np.int64]) -> Finished:
            time.sleep(next(self._waits))
            return self._rows.advance(rows)

    def __init__(self, generator: Generator, waits: Iterable[float]) -> None:
        self._generator, self._waits = generator, iter(waits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def trajectories(self) -> Any:
        return self.Rows(self._generator.trajectories(), self._waits)


def quick(private_bundle: Path, steps: int) -> Generator:
    return open_generator(private_bundle, "cpu", ["generation.attempts=1", f"generation.steps={steps}"])


def test_measured_at_a_bad_moment(private_bundle: Path) -> None:
    """If one row takes long already, single rows would not make steps any shorter."""
    worker = Worker(cast(Generator, SlowCalls(quick(private_bundle, 2), repeat(0.15))))
    worker.measure()
    assert worker.batch >= 32


def test_a_single_delay_does_not_end_the_measurement(private_bundle: Path) -> None:
    """Without it, steps of a few more rows would hardly take longer."""
    # the first image takes two calls, each size two at first: this is one of two rows
    waits = chain(repeat(0.0, 4), [1.0], repeat(0.0))
    worker = Worker(cast(Generator, SlowCalls(quick(private_bundle, 2), waits)))
    worker.measure()
    assert worker.batch > 2


def test_a_fixed_batch_stays(generator: Generator) -> None:
    worker = Worker(generator, 5)
    worker.measure()
    assert worker.batch == 5


@pytest.mark.parametrize("size", [1, 4])
def test_a_small_request_overtakes_a_large_one(generator: Generator, size: int) -> None:
    """It needs few more steps than alone."""

    def steps_until_done(worker: Worker, request: Request) -> int:
        steps = 0
        while request.missing:
            worker.step()
            steps += 1
        return steps

    alone = Worker(generator, 16)
    request = alone.make_request(size, seed=1)
    alone.add(request)
    own = steps_until_done(alone, request)
    worker = Worker(generator, 16)
    worker.add(worker.make_request(300, seed=2))
    for _ in range(3):
        worker.step()
    request = worker.make_request(size, seed=1)
    worker.add(request)
    assert steps_until_done(worker, request) <= own + 2


def test_a_large_request_gets_little_of_the_decoder_beside_a_small_one(private_bundle: Path) -> None:
    """Before measurement a step of n rows costs n: beside four rows, the large request has one row and one latent."""
    counting = Fails(quick(private_bundle, 4))
    worker = Worker(cast(Generator, counting), 16)
    large, small = (worker.make_request(count, seed=1) for count in (200, 4))
    worker.add(large)
    while large.missing > 150:
        worker.step()
    assert max(counting.decoded) > 5
    counting.decoded.clear()
    worker.add(small)
    steps = 0
    while small.missing:
        worker.step()
        steps += 1
    assert steps == counting.calls()
    assert max(counting.decoded) <= 5


def test_a_request_that_comes_waits_for_one_group_of_the_decoder(private_bundle: Path) -> None:
    """All candidates of the large request finish in one step, and only a group of them is decoded in it."""
    counting = Fails(quick(private_bundle, 4))
    worker = Worker(cast(Generator, counting), 100)
    worker.add(worker.make_request(200, seed=1))
    for _ in range(counting.calls() - 1):
        worker.step()
    assert not counting.decoded
    worker.step(lambda: True)
    assert counting.decoded == [QUICK_LATENTS]
    worker.step()
    assert sum(counting.decoded) > 3 * QUICK_LATENTS
    assert max(counting.decoded) == QUICK_LATENTS


@pytest.mark.parametrize("requests", [1, 12])
def test_candidates_in_vain(private_bundle: Path, requests: int) -> None:
    """Where requests fill the batch, none draws more candidates than it has open places; alone it draws ahead."""
    probed = open_generator(private_bundle, "cpu", ["generation.attempts=8", "generation.steps=2"])
    worker = Worker(probed, 8)
    for seed in range(requests):
        worker.add(worker.make_request(2, [0, 1], seed))
    worker.step()
    flying = [len(progress.rows) for progress in worker._requests.values()]
    assert max(flying) == (4 if requests == 1 else 1)
    found: dict[Request, Images] = defaultdict(dict)
    work(worker, found)
    for request, images in found.items():
        assert sorted(images) == [0, 1]
        assert request.missing == 0
