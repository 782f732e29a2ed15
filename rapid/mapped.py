"""Arrays that may be larger than memory: mapped from files that have no name.

A scratch file is removed from its folder as soon as it is open, and only its owner could open it. So it is never left
behind, however the process ends; the system frees its space with the last array that is mapped from it.

Pages of a mapped array count as memory of the process once they were read, until the system needs them elsewhere.
`release` gives them back between two batches; nothing is lost, because the file still has them.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 256 << 20
"""Bytes above which an array is mapped."""
BLOCK = 4096
"""Rows that are copied or hashed at a time, at most."""
BLOCK_BYTES = 16 << 20
"""Bytes of them: what is made of a block may take eight times as many."""
_maps: set[ReferenceType[mmap.mmap]] = set()
_folder: ContextVar[Path | None] = ContextVar("scratch folder", default=None)


@contextmanager
def scratch_in(folder: Path) -> Iterator[None]:
    """Within the block, scratch files lie on the disk of `folder`, which need not exist; by default that of TMPDIR."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def empty(shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """A new array of any content: in memory, or mapped from a scratch file if it is larger than LARGE bytes.

    Raises:
        OSError: no space for the scratch file.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= LARGE:
        return np.empty(shape, dtype)
    with _scratch_file() as file:
        # a full disk is an error here; later, writing to the mapped array would end the process
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return _mapped(file, 0, shape, dtype)


def empty_tensor(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A new tensor of the dtype and on the device of `like`; on the CPU it is mapped if it is larger than LARGE."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size <= LARGE:
        return like.new_empty(shape)
    return torch.from_numpy(empty((size,))).view(like.dtype).view(shape)


def map_file(path: Path, offset: int, shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """The array that a file holds from byte `offset` on, in C order. It must not be written to.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _mapped(file, offset, shape, dtype, read_only=True)


def release() -> None:
    """Give back the pages of all mapped arrays: the next access reads them again, mostly from the system's cache."""
    # one call copies them all; a WeakSet, which copies in Python, fails when another thread maps meanwhile
    for reference in _maps.copy():
        if (mapping := reference()) is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def blocks(rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The rows of an array, at most BLOCK and about BLOCK_BYTES at a time; those before are released."""
    step = _block(rows)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
        release()


def joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The rows of several arrays of one dtype and row shape, one after the other."""
    result, start = empty((sum(len(rows) for rows in arrays), *arrays[0].shape[1:]), arrays[0].dtype), 0
    for rows in arrays:
        for block in blocks(rows):
            result[start : start + len(block)] = block
            start += len(block)
    return result


def taken(rows: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    """Some rows of an array, in the order of `indices`, int64 (n,)."""
    result = empty((len(indices), *rows.shape[1:]), rows.dtype)
    step = _block(rows)
    for start in range(0, len(indices), step):
        result[start : start + step] = rows[indices[start : start + step]]
        release()
    return result


def parts(rows: Tensor) -> Iterator[Tensor]:
    """The rows of a tensor, at most BLOCK at a time; those before are released."""
    for part in rows.split(BLOCK):
        yield part
        release()


class Rows:
    """A tensor that is filled from its first row on; see `empty_tensor`.

    Args:
        count: number of all rows.

    Attributes:
        all: the tensor, (count, ...); there is none before the first rows are appended.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._filled = 0
        self.all: Tensor

    def append(self, rows: Tensor) -> None:
        """Append rows (n, ...)."""
        if not self._filled:
            self.all = empty_tensor((self._count, *rows.shape[1:]), rows)
        self.all[self._filled : self._filled + len(rows)] = rows
        self._filled += len(rows)
        release()


class Growing:
    """An array to which rows are appended until it is complete; more than LARGE bytes go to a scratch file."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._held = self._rows = 0
        self._file: BinaryIO | None = None

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows (n, ...), all of one dtype and row shape.

        Raises:
            OSError: no space for the scratch file.
        """
        self._parts.append(rows)
        self._row = np.empty(rows.shape[1:], rows.dtype)
        self._rows += len(rows)
        self._held += rows.nbytes
        if self._held > LARGE:
            self._file = self._file or _scratch_file()
            self._write()

    def finish(self) -> NDArray[Any]:
        """All rows; at least one part was appended. The object cannot be used afterwards."""
        if self._file is None:
            return np.concatenate(self._parts)
        self._write()
        with self._file as file:
            file.flush()
            return _mapped(file, 0, (self._rows, *self._row.shape), self._row.dtype)

    def close(self) -> None:
        """Drop what was appended."""
        self._parts = []
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        assert self._file is not None
        for part in self._parts:
            self._file.write(np.ascontiguousarray(part).data)
        self._parts, self._held = [], 0


def _block(rows: NDArray[Any]) -> int:
    return max(1, min(BLOCK, BLOCK_BYTES // max(1, math.prod(rows.shape[1:]) * rows.itemsize)))


def _scratch_file() -> BinaryIO:
    folder = _folder.get()
    while folder is not None and not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return tempfile.TemporaryFile(dir=folder)


def _mapped(
    file: BinaryIO, offset: int, shape: tuple[int, ...], dtype: Any, *, read_only: bool = False
) -> NDArray[Any]:
    """Map a part of a file; the file can then be closed."""
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    size = offset - start + math.prod(shape) * np.dtype(dtype).itemsize
    # PyTorch wants arrays that can be written; pages that were would be copies, for which no memory is set aside
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0) if read_only else mmap.MAP_SHARED
    mapping = mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    _maps.add(ref(mapping, _maps.discard))
    return np.ndarray(shape, dtype, mapping, offset - start)
