import sys

import numpy as np
import pytest
import rapid_index.key_writer
import rapid_index.keys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rapid_index import KnowledgeBase, KnowledgeBaseError

TYPES = ["flat", "hnsw", "ivf"]


def brute_force(keys, queries):
    """Squared distances in float64, (n, size)."""
    return ((queries.astype(np.float64)[:, None] - keys.astype(np.float64)[None]) ** 2).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 60),
    dim=st.integers(1, 40),
    count=st.integers(0, 40),
    wanted=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_flat_is_brute_force(tmp_path_factory, build, size, dim, count, wanted, seed):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((size, dim)).astype(np.float32)
    queries = rng.standard_normal((count, dim)).astype(np.float32)
    neighbours = min(wanted, size)
    kb = KnowledgeBase.open(build(tmp_path_factory.mktemp("kb") / "kb", keys, batch=7))
    found = kb.search(queries, neighbours)
    assert found.indices.shape == found.distances.shape == (count, neighbours)
    assert found.indices.dtype == np.int64 and found.distances.dtype == np.float32
    truth = brute_force(keys, queries)
    np.testing.assert_allclose(found.distances, np.sort(truth, axis=1)[:, :neighbours], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.distances, np.take_along_axis(truth, found.indices, 1), rtol=1e-4, atol=1e-5)
    assert all(len(set(row)) == neighbours for row in found.indices.tolist())


@pytest.mark.parametrize("index_type", ["hnsw", "ivf"])
def test_recall_of_approximate_indices(tmp_path, build, clusters, index_type):
    keys = clusters(3000, 16)
    queries = keys[::10] + 0.05 * np.random.default_rng(1).standard_normal((300, 16)).astype(np.float32)
    kb = KnowledgeBase.open(build(tmp_path / "kb", keys, index_type=index_type, batch=500))
    truth = np.argsort(brute_force(keys, queries), axis=1, kind="stable")
    found = kb.search(queries, 5)
    assert (found.indices[:, 0] == truth[:, 0]).mean() > 0.98
    overlap = [len(set(a) & set(b)) / 5 for a, b in zip(found.indices.tolist(), truth[:, :5].tolist(), strict=True)]
    assert np.mean(overlap) > 0.95


@pytest.mark.parametrize("index_type", TYPES)
def test_many_at_once_is_one_by_one(tmp_path, build, index_type):
    # 512 queries of length 512: a batch for which faiss uses matrix products, with other roundings, if it is let.
    rng = np.random.default_rng(0)
    keys = (10 + rng.standard_normal((300, 512))).astype(np.float32)
    queries = (10 + 0.01 * rng.standard_normal((512, 512))).astype(np.float32)
    kb = KnowledgeBase.open(build(tmp_path / "kb", keys, index_type=index_type))
    together = kb.search(queries, 3)
    for order in (np.arange(512), rng.permutation(512)[:50]):
        single = [kb.search(queries[i : i + 1], 3) for i in order]
        assert np.array_equal(together.indices[order], np.concatenate([one.indices for one in single]))
        assert np.array_equal(together.distances[order], np.concatenate([one.distances for one in single]))


@pytest.mark.parametrize("index_type", TYPES)
def test_all_entries_as_neighbours(tmp_path, build, clusters, index_type, monkeypatch):
    monkeypatch.setattr(rapid_index.keys, "IVF_PROBES", 1)
    keys = clusters(400, 8)
    kb = KnowledgeBase.open(build(tmp_path / "kb", keys, index_type=index_type))
    found = kb.search(keys[:20], 400)
    assert np.array_equal(np.sort(found.indices, axis=1), np.tile(np.arange(400), (20, 1)))
    assert (np.diff(found.distances, axis=1) >= 0).all()
    assert np.array_equal(found.indices[:, 0], np.arange(20))


def test_rows_that_a_graph_misses_are_searched_exactly(tmp_path, build, clusters, monkeypatch):
    keys = clusters(200, 8)
    kb = KnowledgeBase.open(build(tmp_path / "kb", keys, index_type="hnsw"))
    right = kb.search(keys[:10], 2)
    graph = kb._keys._index
    search = graph.search

    def poor(queries, neighbours, params=None):
        distances, indices = search(queries, neighbours, params=params)
        indices[::2, 1] = -1
        return distances, indices

    monkeypatch.setattr(graph, "search", poor)
    found = kb.search(keys[:10], 2)
    assert np.array_equal(found.indices, right.indices)
    assert np.array_equal(found.distances, right.distances)


@pytest.fixture(scope="module", params=TYPES)
def small(request, tmp_path_factory):
    from rapid_index import KnowledgeBaseWriter

    keys = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    keys[0] = 0
    path = tmp_path_factory.mktemp("small") / "kb"
    with KnowledgeBaseWriter(
        path, key_dim=4, value_shape=(), k=2, v=1, timesteps=2, networks={}, index_type=request.param
    ) as writer:
        writer.append(keys, np.zeros(50, np.float32), np.zeros(50, np.int64))
    return KnowledgeBase.open(path)


@settings(max_examples=60, deadline=None)
@given(queries=hnp.arrays(np.float32, st.tuples(st.integers(0, 20), st.just(4)), elements=st.floats(width=32)))
def test_any_query_has_neighbours(small, queries):
    before = queries.copy()
    found = small.search(queries, 3)
    assert ((found.indices >= 0) & (found.indices < 50)).all()
    assert np.isfinite(found.distances).all() and (found.distances >= 0).all()
    assert np.array_equal(queries, before, equal_nan=True)  # not changed in place


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_zero(small, bad):
    good = np.full((3, 4), 0.5, np.float32)
    queries = good.copy()
    queries[1, 2] = bad
    queries[2] = bad
    good[1, 2] = 0
    good[2] = 0
    found, expected = small.search(queries, 2), small.search(good, 2)
    assert np.array_equal(found.indices, expected.indices)
    assert np.array_equal(found.distances, expected.distances)
    assert found.indices[2, 0] == 0


def test_no_queries(small):
    found = small.search(np.empty((0, 4), np.float32), 7)
    assert found.indices.shape == found.distances.shape == (0, 7)
    assert found.indices.dtype == np.int64 and found.distances.dtype == np.float32


def test_wrong_arguments_are_named(small):
    good = np.zeros((2, 4), np.float32)
    for queries in (good.astype(np.float64), [[0.0] * 4], good[0], good[:, :3], good[None]):
        with pytest.raises(ValueError, match="queries must"):
            small.search(queries)
    for neighbours in (0, -1, 51):
        with pytest.raises(ValueError, match=r"neighbours must be in 1\.\.50"):
            small.search(good, neighbours)


def test_queries_in_any_memory_order(small):
    queries = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32).T
    assert np.array_equal(small.search(queries, 3).indices, small.search(queries.copy(order="C"), 3).indices)


@pytest.mark.parametrize("index_type", TYPES)
@pytest.mark.parametrize("batch", [1, 30, 100, 1000])
def test_order_of_entries_across_training(tmp_path, build, clusters, index_type, batch, monkeypatch):
    monkeypatch.setattr(rapid_index.key_writer, "TRAINING_KEYS", 100)
    monkeypatch.setattr(rapid_index.key_writer, "BLOCK", 64)
    monkeypatch.setattr(rapid_index.key_writer, "GROUP", 50 * 8 * 4)
    keys = clusters(250, 8)
    kb = KnowledgeBase.open(build(tmp_path / "kb", keys, index_type=index_type, batch=batch))
    assert np.array_equal(kb.search(keys).indices[:, 0], np.arange(250))


def test_large_but_allowed_keys_do_not_overflow(tmp_path, build):
    kb = KnowledgeBase.open(build(tmp_path / "kb", [[1e15, -1e15], [0, 0]]))
    found = kb.search(np.array([[-3e38, 3e38], [3e38, -3e38]], np.float32), 2)
    assert found.indices.tolist() == [[1, 0], [0, 1]]
    assert np.isfinite(found.distances).all()


def test_without_faiss_one_line_says_what_to_install(monkeypatch):
    rapid_index.keys.load_faiss.cache_clear()
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(KnowledgeBaseError, match="pip install"):
        rapid_index.keys.load_faiss()
    monkeypatch.undo()
    rapid_index.keys.load_faiss.cache_clear()


@pytest.mark.parametrize("index_type", ["flat", "ivf"])
def test_a_format_that_faiss_changed_is_told_before_there_are_keys(index_type, monkeypatch):
    import faiss

    rapid_index.check_index_type(index_type)
    plain = faiss.serialize_index
    monkeypatch.setattr(faiss, "serialize_index", lambda index: np.append(plain(index), np.uint8(0)))
    with pytest.raises(KnowledgeBaseError, match="or use hnsw"):
        rapid_index.check_index_type(index_type)
    rapid_index.check_index_type("hnsw")


def test_lists_grow_with_the_size_and_probes_with_the_lists():
    counts = [rapid_index.key_writer.list_count(size) for size in (1, 38, 1000, 10**4, 10**6, 10**7)]
    assert counts == [1, 1, 25, 256, 4000, 12649]
    probes = [rapid_index.keys.probe_count(count) for count in counts]
    assert probes == [1, 1, 16, 32, 126, 224]


@pytest.mark.parametrize("index_type", ["flat", "ivf"])
def test_a_streamed_file_is_what_faiss_writes(tmp_path, build, clusters, index_type, monkeypatch):
    """Of the same index, made by faiss in memory: keys in several blocks and groups of lists."""
    import faiss

    monkeypatch.setattr(rapid_index.key_writer, "BLOCK", 300)
    monkeypatch.setattr(rapid_index.key_writer, "GROUP", 700 * 8 * 4)
    keys = clusters(2000, 8)
    path = build(tmp_path / "kb", keys, index_type=index_type, batch=170) / "keys.faiss"
    assert [file.name for file in path.parent.iterdir() if "scratch" in file.name] == []
    index = faiss.read_index(str(path))
    if index_type == "ivf":
        assert index.nlist == 51
        again = faiss.clone_index(index)
        again.reset()
        again.add(keys)
        for number in range(index.nlist):
            own, other = (
                faiss.rev_swig_ptr(one.invlists.get_ids(number), one.invlists.list_size(number)).tolist()
                for one in (index, again)
            )
            assert own == other
    else:
        again = faiss.IndexFlatL2(8)
        again.add(keys)
    assert path.read_bytes() == faiss.serialize_index(again).tobytes()


@pytest.mark.parametrize("index_type", ["flat", "ivf"])
def test_keys_are_not_held_in_memory(tmp_path, settings, index_type, monkeypatch):
    """Apart from a sample, and one group of lists."""
    import tracemalloc

    from rapid_index import KnowledgeBaseWriter

    monkeypatch.setattr(rapid_index.key_writer, "TRAINING_KEYS", 500)
    monkeypatch.setattr(rapid_index.key_writer, "list_count", lambda size: 16)
    monkeypatch.setattr(rapid_index.key_writer, "BLOCK", 500)
    monkeypatch.setattr(rapid_index.key_writer, "GROUP", 2**20)
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        with KnowledgeBaseWriter(
            tmp_path / "kb", key_dim=512, value_shape=(), index_type=index_type, **settings
        ) as writer:
            for _ in range(16):
                keys = rng.standard_normal((500, 512), dtype=np.float32)  # 1 MB
                writer.append(keys, np.zeros(500, np.float32), np.zeros(500, np.int64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "kb" / "keys.faiss").stat().st_size > 15 * 2**20
    assert peak < 10 * 2**20


def test_exact_search_and_recall(tmp_path, build, clusters):
    keys = clusters(1000, 8)
    queries = np.random.default_rng(5).standard_normal((30, 8)).astype(np.float32)
    truth = np.argsort(brute_force(keys, queries), axis=1, kind="stable")[:, :5]
    for index_type in TYPES:
        kb = KnowledgeBase.open(build(tmp_path / index_type, keys, index_type=index_type))
        assert np.array_equal(kb.search(queries, 5, exact=True).indices, truth)
        found = kb.search(queries, 5).indices
        share = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found.tolist(), truth.tolist(), strict=True)])
        assert kb.recall(queries, 5) == pytest.approx(share)
        flat = kb.flat_keys()
        assert (flat is None) == (index_type != "flat")
        if flat is not None:
            assert np.array_equal(flat, keys)
    with pytest.raises(ValueError, match="queries must not be empty"):
        kb.recall(queries[:0])


def test_an_index_on_a_gpu_is_tried_in_another_process(tmp_path, build, clusters, monkeypatch):
    from rapid_index import gpu, move_to_gpu

    kb = KnowledgeBase.open(build(tmp_path / "kb", clusters(400, 8), index_type="ivf"))
    before = kb.search(clusters(20, 8, seed=1)).indices
    gpu.gpu_problem.cache_clear()
    problem = move_to_gpu(kb, 0)
    assert "\n" not in problem
    if not hasattr(rapid_index.keys.load_faiss(), "StandardGpuResources"):
        assert problem == "the installed faiss is built for CPUs alone (pip install faiss-gpu in its place)"
        # one that says it has a GPU part, and ends the process that tries it
        monkeypatch.setattr(rapid_index.keys.load_faiss(), "StandardGpuResources", object, raising=False)
        gpu.gpu_problem.cache_clear()
        assert "does not work on GPU 0" in move_to_gpu(kb, 0, beside="import os; os.abort()")
        gpu.gpu_problem.cache_clear()
        assert np.array_equal(kb.search(clusters(20, 8, seed=1)).indices, before)
