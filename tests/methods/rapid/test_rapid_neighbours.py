"""Choosing records: by class with the given frequencies, and evenly among the nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rapid.bundle import Bundle
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.neighbours import ClassRecords, choose_neighbours
from rapid.methods.rapid.search import open_search


def test_frequencies_are_likeness_times_even_within_a_class() -> None:
    labels = np.array([2, 0, 0, 2, 2, 1])
    likeness = np.array([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]])
    records = ClassRecords(likeness, labels)
    rng, count = np.random.default_rng(0), 60_000
    found = np.bincount(records.choose(np.zeros(count, np.int64), rng.random((count, 2))), minlength=6)
    expected = np.array([0.2 / 3, 0.25, 0.25, 0.2 / 3, 0.2 / 3, 0.3]) * count
    assert stats.chisquare(found, expected).pvalue > 1e-4
    assert set(records.choose(np.ones(500, np.int64), rng.random((500, 2))).tolist()) == {0, 3, 4}


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    weights=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    uniforms=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)), max_size=10),
)
def test_only_records_of_classes_with_a_weight(
    labels: list[int], weights: list[float], uniforms: list[tuple[float, float]]
) -> None:
    """Label 5 is the null label of unlabelled records, and public classes may have no record."""
    known, likeness = np.array(labels), np.array([weights])
    if all(label == 5 for label in labels):
        with pytest.raises(ValueError, match="no record"):
            ClassRecords(likeness, known)
        return
    chosen = ClassRecords(likeness, known).choose(np.zeros(len(uniforms), np.int64), np.array(uniforms).reshape(-1, 2))
    none = not any(weights[label] > 0 for label in labels if label < 5)
    assert all(known[index] < 5 and (none or weights[known[index]] > 0) for index in chosen)


def test_one_of_the_nearest_is_drawn_evenly(private: Bundle) -> None:
    base = open_knowledge_base(private)
    rng = np.random.default_rng(0)
    own = np.repeat(rng.normal(size=(1, base.manifest.key_dim)).astype(np.float32), 3000, axis=0)
    search, queries = open_search(base, torch.device("cpu")), torch.from_numpy(own)
    nearest = base.search(own[:1], 4).indices[0]
    assert (choose_neighbours(search, queries, 4, None) == nearest[0]).all()
    found = choose_neighbours(search, queries, 4, rng.random(3000))
    assert stats.chisquare([(found == record).sum() for record in nearest]).pvalue > 1e-4
    assert choose_neighbours(search, queries[:2], 4, np.array([0.0, np.nextafter(1, 0)])).tolist() == [
        nearest[0],
        nearest[3],
    ]


def test_the_ends_of_the_unit_interval() -> None:
    records = ClassRecords(np.array([[0.0, 0.1, 0.2, 0.0]]), np.array([0, 1, 2, 3]))
    ends = np.array([[0.0, 0.0], [np.nextafter(1, 0), np.nextafter(1, 0)]])
    assert records.choose(np.zeros(2, np.int64), ends).tolist() == [1, 2]
