"""Places and candidates, against the rule written as a loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.sampling.acceptance import Selection


def candidates(seen: list[int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images that hold their own number, and probabilities with the largest at the class seen."""
    images = np.arange(len(seen), dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    probabilities = np.full((len(seen), classes), 0.1, np.float32)
    probabilities[np.arange(len(seen)), seen] = 0.5 + np.arange(len(seen)) / 1000
    return images, probabilities


@given(
    wanted=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    seen=st.lists(st.integers(0, 3), min_size=20, max_size=60),
)
def test_a_place_gets_the_first_candidate_of_its_class(wanted: list[int], seen: list[int]) -> None:
    selection = Selection(np.array(wanted))
    images, probabilities = candidates(seen, 4)
    found = []
    for number in range(len(seen)):
        found += selection.offer(number, images[number], probabilities[number])
    expected: list[int | None] = [None] * len(wanted)
    left = list(range(len(seen)))
    for place, label in enumerate(wanted):
        match = next((number for number in left if seen[number] == label), None)
        if match is not None:
            expected[place] = match
            left.remove(match)
    assert selection.missing == expected.count(None)
    found += selection.fill()
    assert all(placed.candidate == placed.image[0, 0] for placed in found)
    filled = [placed.candidate for placed in sorted(found, key=lambda placed: placed.place)]
    assert len(filled) == len(wanted)
    assert all(number in (None, found) for number, found in zip(expected, filled, strict=True))
    # nothing is used twice, and all places are filled
    assert len(set(filled)) == len(wanted)
    assert selection.missing == 0


def test_open_places_get_the_likeliest_of_what_is_left() -> None:
    selection = Selection(np.array([0, 1, 1]))
    images, probabilities = candidates([0, 2, 2, 2], 3)
    probabilities[1:, 1] = [0.2, 0.4, 0.3]
    placed = [found for number in range(4) for found in selection.offer(number, images[number], probabilities[number])]
    assert selection.missing == 2
    placed += selection.fill()
    assert [(found.place, found.candidate) for found in placed] == [(0, 0), (1, 2), (2, 3)]


def test_too_few_candidates() -> None:
    selection = Selection(np.array([0, 1]))
    images, probabilities = candidates([0], 2)
    selection.offer(0, images[0], probabilities[0])
    with pytest.raises(ValueError, match="1 places are open"):
        selection.fill()
