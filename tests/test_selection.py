"""Places and candidates, against the rule written as a loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.selection import Selection


def candidates(seen: list[int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images that hold their own number, and probabilities with the largest at the class seen."""
    images = np.arange(len(seen), dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    probabilities = np.full((len(seen), classes), 0.1, np.float32)
    probabilities[np.arange(len(seen)), seen] = 0.5 + np.arange(len(seen)) / 1000
    return images, probabilities


@given(
    wanted=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    seen=st.lists(st.integers(0, 3), min_size=20, max_size=60),
    cut=st.integers(1, 60),
)
def test_a_place_gets_the_first_candidate_of_its_class(wanted: list[int], seen: list[int], cut: int) -> None:
    selection = Selection(np.array(wanted))
    images, probabilities = candidates(seen, 4)
    placed = {}
    for start in range(0, len(seen), cut):
        placed |= dict(selection.offer(images[start : start + cut], probabilities[start : start + cut]))
    expected: list[int | None] = [None] * len(wanted)
    left = list(range(len(seen)))
    for place, label in enumerate(wanted):
        match = next((number for number in left if seen[number] == label), None)
        if match is not None:
            expected[place] = match
            left.remove(match)
    assert selection.missing == expected.count(None)
    placed |= dict(selection.fill())
    filled = [int(placed[place][0, 0]) for place in range(len(wanted))]
    assert all(number in (None, found) for number, found in zip(expected, filled, strict=True))
    # nothing is used twice, and all places are filled
    assert len(set(filled)) == len(wanted)
    assert selection.missing == 0


def test_open_places_get_the_likeliest_of_what_is_left() -> None:
    selection = Selection(np.array([0, 1, 1]))
    images, probabilities = candidates([0, 2, 2, 2], 3)
    probabilities[1:, 1] = [0.2, 0.4, 0.3]
    placed = selection.offer(images, probabilities)
    assert selection.missing == 2
    placed += selection.fill()
    assert [(place, int(image[0, 0])) for place, image in placed] == [(0, 0), (1, 2), (2, 3)]


def test_too_few_candidates() -> None:
    selection = Selection(np.array([0, 1]))
    selection.offer(*candidates([0], 2))
    with pytest.raises(ValueError, match="1 places are open"):
        selection.fill()
