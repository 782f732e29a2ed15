"""Orders: whatever the moments at which candidates are drawn and finished, the same images in the same places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rapid.order import Odds, Order

CLASSES = 4


def seen_in(seed: int, numbers: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Images that hold their own number, and what the judge sees in them: a function of seed and number."""
    images = np.stack([np.array([[number % 256, number // 256]], np.uint8) for number in numbers.tolist()])
    rows = [np.random.default_rng([seed, number]).dirichlet(np.ones(CLASSES)) for number in numbers.tolist()]
    return images, np.array(rows, np.float32)


def serve(order: Order, batch: int, turns: list[int]) -> dict[int, int]:
    """Fill an order; `turns` say which of the candidates in flight is finished next."""
    placed: dict[int, int] = {}
    flying: list[int] = []
    while order.missing:
        numbers, labels = order.draw(batch - len(flying))
        if labels is not None and order.labels is not None:
            assert set(labels.tolist()) <= set(order.labels.tolist())
        flying += numbers.tolist()
        assert order.in_flight == len(flying)
        assert len(flying) <= batch
        turn = turns.pop() % len(flying) if turns else 0
        done = np.array([flying.pop(turn)])
        images, rows = seen_in(order.seed, done)
        for place, candidate, image in order.offer(done, images, None if order.labels is None else rows):
            assert place not in placed
            placed[place] = int(image[0, 0]) + 256 * int(image[0, 1])
            assert placed[place] == candidate
    assert order.wants == 0
    return placed


@given(
    wanted=st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
    attempts=st.integers(1, 4),
    batch=st.integers(1, 30),
    turns=st.lists(st.integers(0, 30), max_size=100),
)
def test_moments_change_nothing(wanted: list[int], seed: int, attempts: int, batch: int, turns: list[int]) -> None:
    def order() -> Order:
        return Order(len(wanted), np.array(wanted), seed, attempts)

    one_by_one = serve(order(), 1, [])
    assert sorted(one_by_one) == list(range(len(wanted)))
    assert serve(order(), batch, list(turns)) == one_by_one
    if attempts == 1:
        assert one_by_one == {place: place for place in range(len(wanted))}
    # no candidate is used twice, and there are not more than there may be
    assert len(set(one_by_one.values())) == len(wanted)
    assert max(one_by_one.values()) < attempts * len(wanted)


@given(count=st.integers(1, 20), batch=st.integers(1, 30), turns=st.lists(st.integers(0, 30), max_size=50))
def test_without_classes(count: int, batch: int, turns: list[int]) -> None:
    assert serve(Order(count, None, 3, 8), batch, turns) == {place: place for place in range(count)}


def test_as_many_candidates_as_will_probably_do() -> None:
    """Two for each image at first; then what the judge's opinions so far ask for, at first those of all orders."""
    order = Order(10, np.zeros(10, np.int64), 0, 8)
    assert order.wants == 20
    numbers, _ = order.draw(100)
    assert len(numbers) == 20
    assert order.wants == 0
    wrong = np.tile(np.array([0, 1], np.float32), (8, 1))
    order.offer(numbers[:8], np.zeros((8, 1, 1), np.uint8), wrong)
    # none of 8 was taken; of all orders 2 in 12: (0 + 8 / 6) / (8 + 8), one in twelve, but 80 are the most
    assert order.wants == 80 - 20
    odds = Odds()
    odds.add(98, 100)
    assert Order(100, np.zeros(100, np.int64), 0, 8, odds=odds).wants == 104
