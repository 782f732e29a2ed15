"""Exact search with torch against a plain loop in float64: any batches, ties, degenerate keys, any query."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from rapid_index import KnowledgeBase, KnowledgeBaseWriter

import rapid.methods.rapid.search
from rapid.methods.rapid.search import ExactSearch, IndexSearch, open_search, sum_in_order

CPU = torch.device("cpu")


def oracle(keys: NDArray[np.float32], queries: NDArray[np.float32], neighbours: int) -> NDArray[np.int64]:
    """The nearest records by distance in float64, equal ones in the order of their numbers."""
    wide = keys.astype(np.float64)
    found = []
    for query in queries.astype(np.float64):
        distances = [sum((a - b) ** 2 for a, b in zip(key, query, strict=True)) for key in wide.tolist()]
        found.append(sorted(range(len(keys)), key=distances.__getitem__)[:neighbours])
    return np.array(found, np.int64).reshape(len(queries), neighbours)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    dim=st.integers(1, 20),
    seed=st.integers(0, 99),
    wanted=st.integers(1, 60),
    offset=st.sampled_from([0, 4096]),
    scale=st.sampled_from([1.0, 2.0**-40, 2.0**20]),
    cuts=st.lists(st.integers(0, 12), max_size=3).map(sorted),
)
def test_the_nearest_with_ties_by_number_in_any_batches(
    size: int, dim: int, seed: int, wanted: int, offset: int, scale: float, cuts: list[int]
) -> None:
    """Small whole numbers have exact distances and many ties; float32 products are bad at an offset and at a scale."""
    rng = np.random.default_rng(seed)
    keys = (scale * (offset + rng.integers(-3, 4, (size, dim)))).astype(np.float32)
    queries = (scale * (offset + rng.integers(-3, 4, (12, dim)))).astype(np.float32)
    neighbours, search = min(wanted, size), ExactSearch(keys, CPU)
    parts = [search.nearest(torch.from_numpy(part), neighbours) for part in np.split(queries, cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), oracle(keys, queries, neighbours))


@pytest.mark.parametrize("neighbours", [1, 5])
def test_many_keys_in_tiles(monkeypatch: pytest.MonkeyPatch, neighbours: int) -> None:
    """Keys of unit length, as the encoder makes, with exact duplicates; tiles and batches much smaller than the set."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3000, 24)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    keys[1500:1600] = keys[7]
    queries = np.concatenate([keys[:40], rng.standard_normal((30, 24)).astype(np.float32)])
    distances = ((queries[:, None].astype(np.float64) - keys.astype(np.float64)) ** 2).sum(2)
    expected = np.argsort(distances, axis=1, kind="stable")[:, :neighbours]
    whole = ExactSearch(keys, CPU).nearest(torch.from_numpy(queries), neighbours)
    monkeypatch.setattr(rapid.methods.rapid.search, "KEYS", 101)
    monkeypatch.setattr(rapid.methods.rapid.search, "ROWS", 9)
    monkeypatch.setattr(rapid.methods.rapid.search, "NUMBERS", 5000)
    tiled = ExactSearch(keys, CPU).nearest(torch.from_numpy(queries), neighbours)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(tiled, expected)


def test_rounded_products_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collapsed encoder: keys differ in their last bits only. Scores are float64 where products are rounded."""
    rng = np.random.default_rng(1)
    keys = (1 + 1e-6 * rng.standard_normal((500, 16))).astype(np.float32)
    queries = (1 + 1e-6 * rng.standard_normal((50, 16))).astype(np.float32)
    expected = oracle(keys, queries, 3)
    search = ExactSearch(keys, CPU)
    np.testing.assert_array_equal(search.nearest(torch.from_numpy(queries), 3), expected)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert rapid.methods.rapid.search._products_are_rounded()
        np.testing.assert_array_equal(search.nearest(torch.from_numpy(queries), 3), expected)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not rapid.methods.rapid.search._products_are_rounded()
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(search.nearest(torch.from_numpy(queries), 3), expected)
    # scores that are wrong by as much as the bound allows
    candidates = ExactSearch._candidates

    def noisy(self: ExactSearch, shifted: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores, found = candidates(self, shifted, len(self._keys))
        worst = self._error(shifted.square().sum(1).sqrt(), torch.float32)[:, None]
        scores = (scores + 0.5 * worst * torch.from_numpy(rng.uniform(-1, 1, tuple(scores.shape)))).float()
        values, places = scores.topk(count, dim=1, largest=False)
        return values, found.gather(1, places)

    monkeypatch.setattr(ExactSearch, "_candidates", noisy)
    np.testing.assert_array_equal(search.nearest(torch.from_numpy(queries), 3), expected)


@settings(max_examples=40, deadline=None)
@given(queries=hnp.arrays(np.float32, st.tuples(st.integers(0, 20), st.just(4)), elements=st.floats(width=32)))
@example(queries=np.full((2, 4), np.nan, np.float32))
def test_any_query_has_neighbours(queries: NDArray[np.float32]) -> None:
    keys = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    counted = np.nan_to_num(queries, nan=0.0, posinf=0.0, neginf=0.0).clip(-1e15, 1e15).astype(np.float32)
    search = ExactSearch(keys, CPU)
    found = search.nearest(torch.from_numpy(queries), 3)
    assert found.shape == (len(queries), 3) and found.dtype == np.int64
    np.testing.assert_array_equal(found, search.nearest(torch.from_numpy(counted), 3))
    alone = [search.nearest(torch.from_numpy(queries[i : i + 1]), 3) for i in range(len(queries))]
    np.testing.assert_array_equal(found, np.concatenate([np.empty((0, 3), np.int64), *alone]))


def test_wrong_arguments_are_named() -> None:
    search = ExactSearch(np.zeros((5, 2), np.float32), CPU)
    with pytest.raises(ValueError, match=r"queries must have shape \(n, 2\)"):
        search.nearest(torch.zeros(3, 4), 1)
    for neighbours in (0, 6):
        with pytest.raises(ValueError, match=r"neighbours must be in 1\.\.5"):
            search.nearest(torch.zeros(3, 2), neighbours)
    with pytest.raises(ValueError, match="finite"):
        ExactSearch(np.full((5, 2), np.nan, np.float32), CPU)


@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.integers(-99, 99)))
def test_sums_in_order(numbers: NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(sum_in_order(torch.from_numpy(numbers)).numpy(), numbers.sum(1))


def test_which_search_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.random.default_rng(0).standard_normal((300, 6)).astype(np.float32)
    queries = torch.from_numpy(keys[:20] + np.float32(0.01))
    found = {}
    for index_type in ("flat", "hnsw", "ivf"):
        with KnowledgeBaseWriter(
            tmp_path / index_type, key_dim=6, value_shape=(), k=2, v=1, timesteps=2, networks={}, index_type=index_type
        ) as writer:
            writer.append(keys, np.zeros(300, np.float32), np.zeros(300, np.int64))
        search = open_search(KnowledgeBase.open(tmp_path / index_type), CPU, gpu_index=True)
        assert isinstance(search, ExactSearch) == (index_type == "flat")
        found[index_type] = search.nearest(queries, 1)
    assert (found["flat"] == found["hnsw"]).all() and (found["flat"] == found["ivf"]).all()
    monkeypatch.setattr(rapid.methods.rapid.search, "LIMIT", 299)
    assert isinstance(open_search(KnowledgeBase.open(tmp_path / "flat"), CPU), IndexSearch)
