"""A line's images against the generator's own, whatever comes and goes meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rapid_server.line import Line
from tests_support import Fails

from rapid.sampling.generate import generate
from rapid.sampling.generator import Generator
from rapid.sampling.request import Order

Images = dict[int, NDArray[np.uint8]]


def work(line: Line, found: dict[Order, Images], steps: int = 10**6) -> None:
    while line.busy and steps:
        step = line.step()
        steps -= 1
        assert step.rows <= line.batch
        for order, made in step.made:
            for one in made:
                assert one.place not in found[order]
                found[order][one.place] = one.image


def check(generator: Generator, order: Order, images: Images) -> None:
    labels = None if order.labels is None else order.labels.tolist()
    expected = generate(generator, order.count, labels, order.seed).images.astype(int)
    assert sorted(images) == list(range(order.count))
    assert max(np.abs(images[place] - expected[place]).max() for place in images) <= 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    orders=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 30)),
        min_size=1,
        max_size=5,
    ),
    batch=st.integers(1, 40),
    gone=st.integers(0, 4),
)
def test_orders_come_and_go(
    generator: Generator, orders: list[tuple[list[int], int, int]], batch: int, gone: int
) -> None:
    line = Line(generator, batch)
    found: dict[Order, Images] = defaultdict(dict)
    taken = []
    for labels, seed, steps in orders:
        order = generator.order(len(labels), labels, seed)
        line.add(order)
        line.add(order)
        taken.append(order)
        work(line, found, steps)
        if len(taken) == gone:
            line.remove(taken.pop())
            line.remove(order)
    work(line, found)
    for order in taken:
        check(generator, order, found[order])


def test_measured(generator: Generator) -> None:
    line = Line(generator)
    line.measure()
    assert line.batch >= 1
    assert not line.busy
    order = generator.order(30, seed=4)
    line.add(order)
    found: dict[Order, Images] = defaultdict(dict)
    work(line, found)
    check(generator, order, found[order])
    assert not line.busy


class Waits:
    """A real generator on a machine on which each network call waits long, whatever its rows."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def noise(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.15)
        return self._generator.noise(*arguments, **options)


def test_measured_at_a_bad_moment(generator: Generator) -> None:
    """A step that takes long with one row is not made shorter by one row at a time."""
    quick = generator.settings.model_copy(update={"steps": 2})
    line = Line(cast(Generator, Waits(Generator(generator.bundle, generator.device, quick))))
    line.measure()
    assert line.batch >= 32


def test_a_fixed_batch_stays(generator: Generator) -> None:
    line = Line(generator, 5)
    line.measure()
    assert line.batch == 5


@pytest.mark.parametrize("size", [1, 4])
def test_a_small_order_overtakes_a_large_one(generator: Generator, size: int) -> None:
    """It needs few more steps than alone."""

    def steps_until_done(line: Line, order: Order) -> int:
        steps = 0
        while order.missing:
            line.step()
            steps += 1
        return steps

    alone = Line(generator, 16)
    order = generator.order(size, seed=1)
    alone.add(order)
    own = steps_until_done(alone, order)
    line = Line(generator, 16)
    line.add(generator.order(300, seed=2))
    for _ in range(3):
        line.step()
    order = generator.order(size, seed=1)
    line.add(order)
    assert steps_until_done(line, order) <= own + 2


def test_a_large_order_takes_little_of_the_decoder_beside_a_small_one(generator: Generator) -> None:
    """Not measured, a step of n rows costs n: the large one may have one row beside four, and one latent decoded."""
    quick = generator.settings.model_copy(update={"steps": 4})
    noting = Fails(Generator(generator.bundle, generator.device, quick))
    line = Line(cast(Generator, noting), 16)
    large, small = (line.generator.order(count, seed=1) for count in (200, 4))
    line.add(large)
    while large.missing > 150:
        line.step()
    assert max(noting.decoded) > 5
    noting.decoded.clear()
    line.add(small)
    steps = 0
    while small.missing:
        line.step()
        steps += 1
    assert steps == noting.route().calls
    assert max(noting.decoded) <= 5
