"""Requests: the same images in the same places, whenever candidates are drawn and finished."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rapid.sampling.acceptance import AcceptanceRate
from rapid.sampling.request import Request

CLASSES = 4


def seen_in(seed: int, numbers: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Images that hold their own number, and what the probe sees in them: a function of seed and number."""
    images = np.stack([np.array([[number % 256, number // 256]], np.uint8) for number in numbers.tolist()])
    rows = [np.random.default_rng([seed, number]).dirichlet(np.ones(CLASSES)) for number in numbers.tolist()]
    return images, np.array(rows, np.float32)


def serve(request: Request, batch: int, turns: list[int]) -> dict[int, int]:
    """Fill a request; `turns` tell which of the candidates in flight finishes next."""
    placed: dict[int, int] = {}
    in_flight: list[int] = []
    while request.missing:
        numbers, labels = request.draw(batch - len(in_flight))
        assert len(numbers) <= batch - len(in_flight)
        if labels is not None and request.labels is not None:
            assert (labels == request.labels[numbers % request.count]).all()
        assert not set(numbers.tolist()) & set(in_flight)
        in_flight += numbers.tolist()
        assert in_flight
        turn = turns.pop() % len(in_flight) if turns else 0
        done = np.array([in_flight.pop(turn)])
        images, rows = seen_in(request.seed, done)
        for place, candidate, image, chances in request.offer(done, images, None if request.labels is None else rows):
            assert place not in placed
            placed[place] = int(image[0, 0]) + 256 * int(image[0, 1])
            assert placed[place] == candidate
            if request.labels is None:
                assert chances is None
            else:
                assert (chances == seen_in(request.seed, np.array([candidate]))[1][0]).all()
    assert request.wants == 0
    return placed


def rule(wanted: list[int], seed: int, attempts: int, confidence: float) -> dict[int, int]:
    """The rule as a loop over all candidates, one after the other."""
    placed: dict[int, int] = {}
    spare = []
    for number in itertools.count():
        if number >= attempts * len(wanted) and number % len(wanted) == 0 and len(spare) + len(placed) >= len(wanted):
            break
        still = [place for place in range(len(wanted)) if place not in placed]
        if not still:
            break
        if wanted[number % len(wanted)] not in [wanted[place] for place in still]:
            continue
        _, rows = seen_in(seed, np.array([number]))
        fitting = [place for place in still if wanted[place] == rows[0].argmax() and rows[0].max() >= confidence]
        if fitting:
            placed[fitting[0]] = number
        else:
            spare.append((number, rows[0]))
    for label in sorted(set(wanted)):
        for place in [place for place in range(len(wanted)) if place not in placed and wanted[place] == label]:
            best = max(range(len(spare)), key=lambda index, label=label: spare[index][1][label])
            placed[place] = spare.pop(best)[0]
    return placed


@given(
    wanted=st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
    attempts=st.integers(1, 4),
    batch=st.integers(1, 30),
    turns=st.lists(st.integers(0, 30), max_size=100),
    confidence=st.sampled_from([0.0, 0.5, 0.7]),
)
def test_the_order_of_events_changes_nothing(
    wanted: list[int], seed: int, attempts: int, batch: int, turns: list[int], confidence: float
) -> None:
    def made() -> Request:
        return Request(len(wanted), np.array(wanted), seed, attempts, confidence=confidence)

    found, request = serve(made(), batch, list(turns)), made()
    serve(request, 1, [])
    assert sum(request.tally.offered.values()) <= request.drawn
    for label, offered in request.tally.offered.items():
        # one after the other, no candidate is drawn that is not offered
        numbers = [n for n in range(100 * len(wanted)) if wanted[n % len(wanted)] == label][:offered]
        seen = [seen_in(seed, np.array([number]))[1][0] for number in numbers]
        sure = [row for row in seen if row.argmax() == label and row.max() >= confidence]
        assert request.tally.accepted[label] == len(sure)
    if attempts == 1:
        assert found == {place: place for place in range(len(wanted))}
    else:
        assert found == rule(wanted, seed, attempts, confidence)


@given(count=st.integers(1, 20), batch=st.integers(1, 30), turns=st.lists(st.integers(0, 30), max_size=50))
def test_without_classes(count: int, batch: int, turns: list[int]) -> None:
    assert serve(Request(count, None, 3, 8), batch, turns) == {place: place for place in range(count)}


def test_as_many_candidates_as_probably_suffice() -> None:
    """Two per image at first, then by the acceptance rate so far."""
    rate = AcceptanceRate()
    request = Request(10, np.zeros(10, np.int64), 0, 8, rate=rate)
    assert request.wants == 20
    numbers, _ = request.draw(100)
    assert len(numbers) == 20
    assert request.wants == 0
    wrong = np.tile(np.array([0, 1], np.float32), (8, 1))
    request.offer(numbers[:8], np.zeros((8, 1, 1), np.uint8), wrong)
    # none of 8 was accepted: 2 in 12, with the initial counts
    assert request.wants == 60 - 12
    rate.add(98, 98)
    eager = Request(100, np.zeros(100, np.int64), 0, 8, rate=rate)
    assert eager.wants == 110
    assert eager.least == 100
    assert len(eager.draw(200, sparing=True)[0]) == 100
    assert (eager.least, eager.wants) == (0, 10)


def test_full_classes_are_not_drawn() -> None:
    """Class 0 is full after two candidates: the following ones are drawn for class 1 alone."""
    request = Request(2, np.array([0, 1]), 0, 8)
    numbers, labels = request.draw(100)
    assert labels is not None
    assert (numbers.tolist(), labels.tolist()) == ([0, 1, 2, 3], [0, 1, 0, 1])
    zeros = np.tile(np.array([1, 0], np.float32), (2, 1))
    assert len(request.offer(numbers[:2], np.zeros((2, 1, 1), np.uint8), zeros)) == 1
    assert [request.needs(number) for number in (2, 3)] == [False, True]
    numbers, labels = request.draw(100)
    assert labels is not None
    assert set(labels.tolist()) <= {1}
    assert numbers.tolist() == list(range(5, 5 + 2 * len(numbers), 2))


def test_a_probe_that_sees_other_classes_leaves_no_place_empty() -> None:
    """Candidates of class 1 fill the places of class 2; those of 2 and 3 are then not made, and none is left for 1."""
    seen = {1: 2, 2: 3, 3: 2}
    request = Request(5, np.array([1, 2, 2, 3, 3]), 0, 2)
    places: list[int] = []
    while request.missing:
        numbers, labels = request.draw(1)
        assert labels is not None
        assert numbers[0] < 20
        chances = np.eye(4, dtype=np.float32)[[seen[int(label)] for label in labels]]
        places += [placed.place for placed in request.offer(numbers, np.zeros((1, 1, 1), np.uint8), chances)]
    assert sorted(places) == [0, 1, 2, 3, 4]
