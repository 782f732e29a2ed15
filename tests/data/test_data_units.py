"""Numbers of people: those of their sorted names, without a copy of the longest name for each image."""

from __future__ import annotations

import tracemalloc
import unicodedata
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rapid.data.units import numbered

LETTERS = st.text(st.sampled_from("ab1 \0e\u0301\u00e9\uffff\U0001f600"), max_size=4)
"""With letters that look alike, and some that UTF-16 sorts in another order."""


def by_numpy(names: Sequence[str]) -> NDArray[np.int64]:
    """A slow version, in which each name takes as much memory as the longest."""
    same = np.array([unicodedata.normalize("NFC", name) for name in names], dtype=np.str_)
    return np.unique(same, return_inverse=True)[1].reshape(-1).astype(np.int64)


@settings(deadline=None)
@given(st.lists(LETTERS, max_size=12) | st.lists(st.text(max_size=3), max_size=12))
@example([])
@example(["b", "a\0", "a", "b", "jose\u0301", "jos\u00e9", "\uffff", "\U0001f600"])
def test_people_have_the_numbers_of_their_sorted_names(names: list[str]) -> None:
    found = numbered(iter(names))
    assert found.dtype == np.int64
    assert found.tolist() == by_numpy(names).tolist()


def test_a_long_name_costs_no_memory_for_the_others() -> None:
    names = [*map(str, range(2000)), "x" * 10_000]
    tracemalloc.start()
    try:
        found = numbered(names)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(found.tolist())) == 2001
    assert peak < 4e6
