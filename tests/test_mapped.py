"""Arrays that are larger than memory, and image sets that are read into them."""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rapid import mapped
from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, join, load_images
from rapid.data.subset import Subset

SMALL = 1000
"""Bytes above which arrays are mapped in these tests."""


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LARGE", SMALL)
    monkeypatch.setattr(mapped, "BLOCK", 3)


def is_mapped(array: np.ndarray) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap) or (isinstance(array, memoryview) and isinstance(array.obj, mmap.mmap))


def test_arrays_are_mapped_in_one_thread_while_others_release() -> None:
    before = sys.getswitchinterval()
    kept = deque((mapped.empty((SMALL + 1,)) for _ in range(100)), 100)
    with ThreadPoolExecutor(2) as pool:
        sys.setswitchinterval(1e-6)
        try:
            mapping = pool.submit(lambda: [kept.append(mapped.empty((SMALL + 1,))) for _ in range(2000)])
            while not mapping.done():
                mapped.release()
            mapping.result()
        finally:
            sys.setswitchinterval(before)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(1, 40), st.sampled_from([np.uint8, np.float32]))
def test_growing_is_concatenation(sizes: list[int], width: int, dtype: type) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, (size, width)).astype(dtype) for size in sizes]
    growing = mapped.Growing()
    for part in parts:
        growing.append(part)
    if not sum(sizes):
        return
    found = growing.finish()
    assert np.array_equal(found, np.concatenate(parts))
    assert found.dtype == dtype
    if found.nbytes > 8 * SMALL:
        assert is_mapped(found)


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 90))), st.data())
def test_rows_are_those_of_numpy(rows: np.ndarray, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30)), np.int64)
    assert np.array_equal(mapped.taken(rows, indices), rows[indices])
    assert np.array_equal(Subset(rows, indices)[1:4], rows[indices][1:4])
    assert len(Subset(rows, indices)) == len(indices)
    assert np.array_equal(mapped.joined([rows, rows]), np.concatenate([rows, rows]))
    blocks = list(mapped.blocks(rows))
    assert {len(block) for block in blocks[:-1]} <= {3}
    assert np.array_equal(np.concatenate(blocks), rows)
    tensor = torch.from_numpy(rows).float()
    filled = mapped.Rows(len(rows))
    for part in mapped.parts(tensor):
        filled.append(part)
    assert torch.equal(filled.all, tensor)


def test_what_is_given_back_is_still_there(tmp_path: Path) -> None:
    array = mapped.empty((50, 1000))
    array[:] = wanted = pixels(50, 1000)
    mapped.release()
    assert np.array_equal(array, wanted)
    path = tmp_path / "file"
    path.write_bytes(b"12345" + wanted.tobytes())
    of_file = mapped.map_file(path, 5, wanted.shape)
    mapped.release()
    assert np.array_equal(of_file, wanted)
    # PyTorch warns of arrays that cannot be written
    assert torch.from_numpy(of_file).sum() == wanted.sum(dtype=np.int64)
    assert not is_mapped(mapped.empty((10, 10)))


def test_blocks_of_large_rows_have_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "BLOCK", 4096)
    images = np.zeros((70, 1024, 1024), np.uint8)
    assert [len(block) for block in mapped.blocks(images)] == [16, 16, 16, 16, 6]
    assert [len(block) for block in mapped.blocks(np.zeros((2, 17 << 20), np.uint8))] == [1, 1]
    assert [len(block) for block in mapped.blocks(np.zeros((5000, 2), np.uint8))] == [4096, 904]


def resident_file_pages() -> int:
    """Bytes of mapped files in the memory of this process."""
    status = Path("/proc/self/status").read_text()
    return sum(int(found) * 1024 for found in re.findall(r"Rss(?:File|Shmem):\s+(\d+) kB", status))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_pass_over_a_large_array_keeps_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "BLOCK", 512)
    with mapped.scratch_in(tmp_path):
        images = mapped.empty((32_768, 1024))
    images[:] = 7
    before = resident_file_pages()
    assert before >= images.nbytes
    mapped.release()
    free = resident_file_pages()
    assert free < before - images.nbytes / 2
    highest, total = 0, 0
    for block in mapped.blocks(images):
        total += int(block.sum(dtype=np.int64))
        highest = max(highest, resident_file_pages())
    assert total == 7 * images.size
    assert highest < free + (8 << 20)


def test_scratch_files_have_no_name_and_belong_to_their_owner(tmp_path: Path) -> None:
    out = tmp_path / "out" / "not" / "yet"
    with mapped.scratch_in(out):
        with mapped._scratch_file() as file:
            found = os.fstat(file.fileno())
            assert found.st_dev == tmp_path.stat().st_dev
            assert found.st_mode & 0o777 == 0o600
            assert found.st_nlink == 0
        array = mapped.empty((50, 1000))
        array[:] = 1
    assert not list(tmp_path.rglob("*"))
    maps = Path("/proc/self/maps").read_text()
    assert re.search(rf"{re.escape(str(tmp_path))}\S* \(deleted\)", maps)
    del array
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_full_disk_is_an_error() -> None:
    """And not a signal that ends the process when the array is written."""
    with pytest.raises(OSError, match=r"space|large"):
        mapped.empty((1 << 50, 1024))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(40, 6, 7), (40, 6, 7, 3), (40, 6, 7, 1)])
def test_large_archives(tmp_path: Path, shape: tuple[int, ...], compressed: bool) -> None:
    images, path = pixels(*shape), tmp_path / "a.npz"
    labels = np.arange(40) % 3
    save = np.savez_compressed if compressed else np.savez
    save(path, labels=labels, images=images)
    found = load_images(path, "private", show_paths=False)
    assert is_mapped(found.images)
    wanted = ImageSet(images[..., 0] if shape[-1] == 1 else images, labels, tuple("012"))
    assert np.array_equal(found.images, wanted.images)
    assert found.fingerprint() == wanted.fingerprint()
    # Fortran's order is read, too
    save(path, images=np.asfortranarray(images))
    assert np.array_equal(load_images(path, "private").images, wanted.images)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(Exception, match="damaged"):
        load_images(path, "private")
    save(path, images=images)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(Exception, match="damaged"):
        load_images(path, "private")


def test_fitting_and_joining_large_sets() -> None:
    grey, colour = ImageSet(pixels(40, 6, 7), None, ()), ImageSet(pixels(41, 8, 8, 3), None, ())
    for form in (ImageSettings(size=8, channels=3), ImageSettings(size=9, fit="resize"), ImageSettings(size=8)):
        sets = [fit_images(images, form, "-") for images in (grey, colour)]
        for images, fitted in zip((grey, colour), sets, strict=True):
            alone = [fit_images(ImageSet(one[None], None, ()), form, "-").images[0] for one in images.images]
            assert np.array_equal(fitted.images, np.stack(alone))
        both = join(sets, "-").images
        assert is_mapped(both)
        assert np.array_equal(both, np.concatenate([images.images for images in sets]))
    same = fit_images(colour, ImageSettings(size=8, channels=3), "-")
    assert same.images is colour.images
