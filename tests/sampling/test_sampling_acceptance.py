"""Acceptance against its rule, written as a loop."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.sampling.acceptance import SLACK, Acceptance, AcceptanceRate, Tally


def candidates(seen: list[int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images that hold their own number, and probabilities with the largest at the class seen."""
    images = np.arange(len(seen), dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    probabilities = np.full((len(seen), classes), 0.1, np.float32)
    probabilities[np.arange(len(seen)), seen] = 0.5 + np.arange(len(seen)) / 1000
    return images, probabilities


@given(
    wanted=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    seen=st.lists(st.integers(0, 3), min_size=20, max_size=60),
    confidence=st.sampled_from([0.0, 0.5, 0.52, 0.9]),
)
def test_a_place_accepts_the_first_candidate_that_is_surely_of_its_class(
    wanted: list[int], seen: list[int], confidence: float
) -> None:
    acceptance = Acceptance(np.array(wanted), confidence)
    images, probabilities = candidates(seen, 4)
    sure = [probabilities[number, label] >= confidence for number, label in enumerate(seen)]
    assert [acceptance.found(row) for row in probabilities] == [
        label if own else None for label, own in zip(seen, sure, strict=True)
    ]
    found = []
    for number in range(len(seen)):
        found += acceptance.offer(number, images[number], probabilities[number])
    expected: list[int | None] = [None] * len(wanted)
    left = list(range(len(seen)))
    for place, label in enumerate(wanted):
        match = next((number for number in left if seen[number] == label and sure[number]), None)
        if match is not None:
            expected[place] = match
            left.remove(match)
    assert acceptance.missing == expected.count(None)
    found += acceptance.fill()
    assert all(accepted.candidate == accepted.image[0, 0] for accepted in found)
    filled = [accepted.candidate for accepted in sorted(found, key=lambda accepted: accepted.place)]
    assert len(filled) == len(wanted)
    assert all(number in (None, found) for number, found in zip(expected, filled, strict=True))
    # nothing is used twice, and all places are filled
    assert len(set(filled)) == len(wanted)
    assert acceptance.missing == 0


def test_open_places_are_filled_with_the_likeliest_of_the_reserve() -> None:
    acceptance = Acceptance(np.array([0, 1, 1]))
    images, probabilities = candidates([0, 2, 2, 2], 3)
    probabilities[1:, 1] = [0.2, 0.4, 0.3]
    found = [one for number in range(4) for one in acceptance.offer(number, images[number], probabilities[number])]
    assert acceptance.missing == 2
    found += acceptance.fill()
    assert [(one.place, one.candidate) for one in found] == [(0, 0), (1, 2), (2, 3)]


@given(seed=st.integers(0, 2**32 - 1), places=st.integers(1, 40), classes=st.integers(1, 5))
def test_what_is_dropped_from_the_reserve_could_fill_no_place(seed: int, places: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.integers(classes, size=places)
    # coarse numbers, so that candidates tie; few are sure enough
    probabilities = rng.integers(0, 100, (1500, classes)).astype(np.float32) / 100
    images = np.arange(1500)[:, None, None]
    acceptance = Acceptance(wanted, 0.99)
    found, rejected = [], []
    for number in range(1500):
        accepted = acceptance.offer(number, images[number], probabilities[number])
        found += accepted
        if not accepted:
            rejected.append(number)
            least, most = min(acceptance.missing, len(rejected)), 2 * acceptance.missing + SLACK
            assert least <= acceptance.reserved <= most
        if not acceptance.missing:
            break
    filled = {one.place for one in found}
    expected = []
    for label in range(classes):
        open_places = [place for place in np.flatnonzero(wanted == label).tolist() if place not in filled]
        best = sorted(rejected, key=lambda number: (-probabilities[number, label], number))[: len(open_places)]
        expected += list(zip(open_places, best, strict=True))
        rejected = [number for number in rejected if number not in best]
    assert [(one.place, one.candidate) for one in acceptance.fill()] == expected


def test_the_reserve_does_not_keep_a_batch_in_memory() -> None:
    acceptance = Acceptance(np.array([0]))
    images, probabilities = candidates([1, 1], 2)
    acceptance.offer(0, images[0], probabilities[0])
    images[:] = 9
    assert acceptance.fill()[0].image.max() == 0


def test_a_large_reserve_is_mapped_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is filled from as one in memory."""

    def filled() -> list[tuple[int, int, int]]:
        acceptance = Acceptance(np.arange(900) % 3)
        images, probabilities = candidates(np.random.default_rng(0).integers(0, 3, 1800).tolist(), 3)
        probabilities[:, 2] = 0
        for number in range(1800):
            acceptance.offer(number, images[number], probabilities[number])
        held.append(acceptance._reserve._pixels)
        return [(one.place, one.candidate, int(one.image.max())) for one in acceptance.fill()]

    held: list[np.ndarray] = []
    expected = filled()
    monkeypatch.setattr("rapid.mapped.LARGE", 1000)
    assert filled() == expected
    assert [isinstance(pixels.base, mmap.mmap) for pixels in held] == [False, True]
    assert len(expected) >= 300


def test_too_few_candidates() -> None:
    acceptance = Acceptance(np.array([0, 1]))
    images, probabilities = candidates([0], 2)
    acceptance.offer(0, images[0], probabilities[0])
    with pytest.raises(ValueError, match="1 places are open"):
        acceptance.fill()


def test_the_rate_starts_at_one_half_and_follows_the_counts() -> None:
    rate = AcceptanceRate()
    assert rate.value == 0.5
    rate.add(0, 8)
    assert rate.value == 2 / 12
    rate.add(988, 988)
    assert rate.value == 990 / 1000


def test_the_tally_counts_each_class_alike() -> None:
    tally = Tally()
    assert tally.share is None
    for seen in (0, 0, 1, 0):
        tally.add(0, seen)
    for seen in (0,) * 8 + (None, 1):
        tally.add(1, seen)
    assert (tally.offered, tally.accepted) == ({0: 4, 1: 10}, {0: 3, 1: 1})
    assert tally.share == (3 / 4 + 1 / 10) / 2
