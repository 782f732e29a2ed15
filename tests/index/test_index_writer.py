import json
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import rapid_index.writer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rapid_index import KnowledgeBase, KnowledgeBaseError, KnowledgeBaseWriter
from rapid_index.files import NpyFile, sha256


def entries(count, dim=4, shape=(2, 3), seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((count, dim)).astype(np.float32),
        rng.standard_normal((count, *shape)).astype(np.float32),
        rng.integers(-1, 10, count),
    )


@pytest.fixture
def make(tmp_path, settings):
    return lambda **changes: KnowledgeBaseWriter(
        tmp_path / "kb", **{**settings, "key_dim": 4, "value_shape": (2, 3), **changes}
    )


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    batches=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    dim=st.integers(1, 8),
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    index_type=st.sampled_from(["flat", "hnsw", "ivf"]),
)
def test_rows_of_keys_values_and_labels_stay_together(tmp_path_factory, batches, dim, shape, index_type):
    keys, values, labels = entries(sum(batches), dim, shape)
    path = tmp_path_factory.mktemp("kb") / "kb"
    options = {"k": 2, "v": 1, "timesteps": 2, "networks": {}, "index_type": index_type}
    with KnowledgeBaseWriter(path, key_dim=dim, value_shape=shape, **options) as writer:
        start = 0
        for count in batches:
            rows = slice(start, start + count)
            writer.append(keys[rows], values[rows], labels[rows])
            start += count
            assert writer.size == start
    kb = KnowledgeBase.open(path)
    found = kb.search(keys)
    assert np.array_equal(found.indices[:, 0], np.arange(len(keys)))
    assert (found.distances == 0).all()
    assert np.array_equal(kb.values(found.indices[:, 0]), values)
    assert np.array_equal(kb.labels, labels)


def test_the_folder_and_its_manifest(tmp_path, make, networks):
    with make() as writer:
        writer.append(*entries(5))
    folder = tmp_path / "kb"
    assert {p.name for p in folder.iterdir()} == {"manifest.json", "keys.faiss", "values.npy", "labels.npy"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.pop("files") == {n: sha256(folder / n) for n in ("keys.faiss", "values.npy", "labels.npy")}
    assert manifest.pop("sizes") == {n: (folder / n).stat().st_size for n in ("keys.faiss", "values.npy", "labels.npy")}
    assert manifest == {
        "format": 1,
        "size": 5,
        "key_dim": 4,
        "value_shape": [2, 3],
        "value_dtype": "float32",
        "metric": "l2",
        "index_type": "flat",
        "k": 600,
        "v": 200,
        "timesteps": 1000,
        "networks": networks,
    }


def test_the_same_entries_make_the_same_files(tmp_path, build):
    keys = entries(60)[0]
    one, other = build(tmp_path / "one", keys, batch=7), build(tmp_path / "other", keys, batch=60)
    for name in ("manifest.json", "keys.faiss", "values.npy", "labels.npy"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_others_may_read_what_the_umask_allows(tmp_path, make):
    old = os.umask(0o022)
    try:
        with make() as writer:
            writer.append(*entries(1))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "kb").stat().st_mode) == 0o755


def test_values_are_streamed_to_disk(tmp_path, settings):
    batch = np.ones((16, 64, 256), np.float32)  # 1 MB
    tracemalloc.start()
    try:
        with KnowledgeBaseWriter(tmp_path / "kb", key_dim=4, value_shape=(64, 256), **settings) as writer:
            for _ in range(30):
                writer.append(np.zeros((16, 4), np.float32), batch, np.zeros(16, np.int64))
        written_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        kb = KnowledgeBase.open(tmp_path / "kb")
        kb.values(np.arange(4))
        read_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "kb" / "values.npy").stat().st_size > 30 * 2**20
    assert written_peak < 4 * 2**20
    assert read_peak < 4 * 2**20


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path, make, kind):
    with pytest.raises(kind), make() as writer:
        writer.append(*entries(5))
        assert len(list(tmp_path.iterdir())) == 1  # the hidden folder
        assert not (tmp_path / "kb").exists()
        raise kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["fsync", "sha256"])
def test_a_failure_during_commit_leaves_nothing(tmp_path, make, monkeypatch, place):
    def fail(path):
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"), make() as writer:
        writer.append(*entries(5))
        monkeypatch.setattr(rapid_index.writer, place, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_not_covered_up(tmp_path, make, monkeypatch):
    def full(self, *rows):
        raise OSError(28, "No space left on device")

    with pytest.raises(KnowledgeBaseError, match="an append failed half-way"), make() as writer:
        writer.append(*entries(5))
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(NpyFile, "append", full)
            writer.append(*entries(5))
        writer.append(*entries(5))  # the caller carries on; keys and values may be out of step
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space"), make() as writer:
        writer.append(*entries(5))
        close = NpyFile.close
        monkeypatch.setattr(NpyFile, "finish", full)
        monkeypatch.setattr(NpyFile, "close", lambda self: (close(self), full(self)))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_knowledge_base(tmp_path):
    program = """if True:
        import os, sys, numpy as np
        from pathlib import Path
        from rapid_index import KnowledgeBaseWriter
        options = dict(key_dim=4, value_shape=(2,), k=2, v=1, timesteps=2, networks={})
        with KnowledgeBaseWriter(Path(sys.argv[1]), **options) as writer:
            writer.append(np.zeros((3, 4), np.float32), np.zeros((3, 2), np.float32), np.zeros(3, np.int64))
            os._exit(9)
    """
    root = Path(rapid_index.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "kb")], cwd=root, check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".kb.partial-")


def test_a_taken_path_is_refused_at_once(tmp_path, make):
    path = tmp_path / "kb"
    for occupy, free in (
        (path.mkdir, path.rmdir),
        (path.touch, path.unlink),
        (lambda: path.symlink_to("nowhere"), path.unlink),
    ):
        occupy()
        with pytest.raises(KnowledgeBaseError, match=r"/kb: exists, and is not overwritten"):
            make()
        free()


def test_a_path_taken_meanwhile_is_left_as_it_is(tmp_path, make):
    with pytest.raises(KnowledgeBaseError, match="not overwritten"), make() as late:
        late.append(*entries(5))
        with make() as early:
            early.append(*entries(7))
    assert [p.name for p in tmp_path.iterdir()] == ["kb"]
    assert len(KnowledgeBase.open(tmp_path / "kb")) == 7


def test_a_missing_folder_is_named(tmp_path, settings):
    with pytest.raises(KnowledgeBaseError, match=r"the folder .*/no does not exist"):
        KnowledgeBaseWriter(tmp_path / "no" / "kb", key_dim=4, value_shape=(2, 3), **settings)


def test_a_relative_path_survives_a_change_of_folder(tmp_path, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with KnowledgeBaseWriter(Path("kb"), key_dim=4, value_shape=(2, 3), **settings) as writer:
        writer.append(*entries(5))
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(KnowledgeBase.open(tmp_path / "kb")) == 5


@pytest.mark.parametrize("index_type", ["flat", "hnsw", "ivf"])
def test_no_entries_are_an_error_empty_batches_are_not(tmp_path, make, index_type):
    with pytest.raises(KnowledgeBaseError, match="no records"), make(index_type=index_type) as writer:
        writer.append(*entries(0))
    assert list(tmp_path.iterdir()) == []
    with make(index_type=index_type) as writer:
        for count in (0, 3, 0, 2, 0):
            writer.append(*entries(count))
    assert len(KnowledgeBase.open(tmp_path / "kb")) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_dim": 0}, "key_dim"),
        ({"value_shape": (2, -1)}, "value_shape"),
        ({"v": 600}, "v < k"),
        ({"k": 2000}, "k <= timesteps"),
        ({"index_type": "pq"}, "index_type"),
        ({"networks": {"encoder": "x"}}, "networks.encoder"),
    ],
)
def test_wrong_settings_are_named_in_one_line(make, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


def with_one(array, number):
    array = array.copy()
    array.flat[-1] = number
    return array


KEYS, VALUES, LABELS = entries(3)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("keys", KEYS.astype(np.float64)),
        ("keys", KEYS.tolist()),
        ("keys", KEYS[:, :3]),
        ("keys", KEYS[0]),
        ("keys", KEYS[:2]),
        ("keys", with_one(KEYS, np.nan)),
        ("keys", with_one(KEYS, np.inf)),
        ("keys", with_one(KEYS, 1e16)),
        ("values", VALUES.astype(np.float16)),
        ("values", VALUES.reshape(3, 6)),
        ("values", VALUES[:1]),
        ("values", with_one(VALUES, np.nan)),
        ("values", with_one(VALUES, -np.inf)),
        ("labels", LABELS.astype(np.int32)),
        ("labels", LABELS.astype(np.float64)),
        ("labels", LABELS[:, None]),
        ("labels", LABELS[:2]),
        ("labels", np.int64(3)),
    ],
)
def test_wrong_arrays_are_named_and_nothing_of_them_is_written(tmp_path, make, name, wrong):
    arrays = {"keys": KEYS, "values": VALUES, "labels": LABELS}
    with make() as writer:
        with pytest.raises(ValueError, match=name):
            writer.append(**{**arrays, name: wrong})
        assert writer.size == 0
        writer.append(**arrays)
    assert len(KnowledgeBase.open(tmp_path / "kb")) == 3


def test_arrays_may_be_reused_and_in_any_memory_order(tmp_path, make):
    keys, values, labels = entries(6)
    with make(index_type="ivf") as writer:
        for i in (0, 3):
            batch = np.asfortranarray(keys[i : i + 3]), np.asfortranarray(values[i : i + 3]), labels[i : i + 3].copy()
            writer.append(*batch)
            for array in batch:
                array[:] = 0
    kb = KnowledgeBase.open(tmp_path / "kb")
    assert np.array_equal(kb.search(keys).indices[:, 0], np.arange(6))
    assert np.array_equal(kb.values(np.arange(6)), values)


def test_append_outside_the_block_and_second_use_are_refused(make):
    writer = make()
    with pytest.raises(RuntimeError, match="with block"):
        writer.append(*entries(1))
    with writer:
        writer.append(*entries(1))
        with pytest.raises(RuntimeError, match="writes one"):
            writer.__enter__()
    with pytest.raises(RuntimeError, match="with block"):
        writer.append(*entries(1))
    with pytest.raises(RuntimeError, match="writes one"):
        writer.__enter__()
