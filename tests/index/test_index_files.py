import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapid_index.files import NpyFile, fsync, sha256


@settings(max_examples=30, deadline=None)
@given(
    row_shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    batches=st.lists(st.integers(0, 7), max_size=5),
    dtype=st.sampled_from([np.float32, np.int64]),
)
def test_reads_back_as_one_array(tmp_path_factory, row_shape, batches, dtype):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    rng = np.random.default_rng(0)
    rows = [(100 * rng.standard_normal((n, *row_shape))).astype(dtype) for n in batches]
    file = NpyFile(path, row_shape, dtype)
    for batch in rows:
        file.append(batch)
    file.finish()
    expected = np.concatenate([np.empty((0, *row_shape), dtype), *rows])
    found = np.load(path)
    assert found.dtype == dtype
    assert np.array_equal(found, expected) and found.shape == expected.shape
    assert sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    fsync(path)
    fsync(path.parent)


def test_non_contiguous_rows_are_written_in_order(tmp_path):
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    file = NpyFile(tmp_path / "a.npy", (4, 3), np.float32)
    file.append(rows.transpose(0, 2, 1))
    file.append(rows[::-1].transpose(0, 2, 1))
    file.finish()
    expected = np.concatenate([rows, rows[::-1]]).transpose(0, 2, 1)
    assert np.array_equal(np.load(tmp_path / "a.npy", mmap_mode="r"), expected)


def test_refuses_other_rows_and_existing_files(tmp_path):
    file = NpyFile(tmp_path / "a.npy", (2,), np.float32)
    with pytest.raises(ValueError, match="rows must be float32"):
        file.append(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="rows must be float32"):
        file.append(np.zeros((1, 3), np.float32))
    with pytest.raises(FileExistsError):
        NpyFile(tmp_path / "a.npy", (2,), np.float32)
    file.close()


def test_room_in_the_header_for_any_number_of_rows(tmp_path):
    file = NpyFile(tmp_path / "a.npy", (4, 64, 64), np.float32)
    file.rows = 10**15
    file.finish()
    assert (tmp_path / "a.npy").stat().st_size % 64 == 0
