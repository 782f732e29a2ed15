"""Writing the keys: an index file of faiss that is made batch by batch, in bounded memory for flat and ivf."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import KnowledgeBaseError
from .keys import load_faiss, one_line
from .manifest import IndexType

HNSW_LINKS, HNSW_CONSTRUCTION = 32, 100
TRAINING_KEYS = 100_000  # ivf: the clusters are fitted to this many keys, or to KEYS_OF_A_LIST for each list if more
KEYS_OF_A_LIST = 39  # faiss advises at least so many training keys for each cluster
BLOCK = 1 << 16  # ivf: keys read at a time
GROUP = 1 << 29  # ivf: bytes of keys that are put in the order of the lists at a time; each time all keys are read
# An index is its header, a count of 8 bytes, and the keys; inverted lists without keys are this many bytes.
COUNT, NO_LISTS = struct.Struct("<Q"), 32


def list_count(size: int) -> int:
    """Number of lists (clusters) of an ivf index of `size` keys: 4 sqrt(size), but 39 keys or more to each."""
    return max(1, min(int(4 * size**0.5), size // KEYS_OF_A_LIST))


def check_index_type(index_type: IndexType) -> None:
    """Raise what a writer of such an index would, before there are keys to write.

    Args:
        index_type: ``flat``, ``hnsw`` or ``ivf``.

    Raises:
        KnowledgeBaseError: faiss is not installed, or writes a format that is not known here.

    """
    KeyWriter(index_type, key_dim=1)


class KeyWriter:
    """Puts keys into a faiss index file batch by batch.

    ``flat`` writes keys straight to the file. ``ivf`` writes them to a scratch file beside it, and reads that a few
    times at the end: to fit the clusters to a random sample, to assign the keys, and to write the lists. It holds 24
    bytes a record in memory, the sample, and `GROUP` bytes. ``hnsw`` holds its whole graph and all keys in memory.

    Args:
        index_type: ``flat``, ``hnsw`` or ``ivf``.
        key_dim: length d of a key.

    Raises:
        KnowledgeBaseError: faiss is not installed, or writes a format that is not known here.

    Attributes:
        size: keys added so far.

    """

    def __init__(self, index_type: IndexType, key_dim: int) -> None:
        faiss = load_faiss()
        self.size = 0
        self._key_dim = key_dim
        self._file: BinaryIO | None = None  # flat: the index; ivf: all keys, until the lists are known
        self._graph: Any = None
        self._path = self._scratch = Path()
        self._flat = index_type == "flat"
        if self._flat:
            self._check_format()
        elif index_type == "ivf":
            # now, and not after the hours in which the keys are made
            _lists_header(self._inverted(1), np.zeros(1, np.int64))
        elif index_type == "hnsw":
            self._graph = faiss.IndexHNSWFlat(key_dim, HNSW_LINKS)
            self._graph.hnsw.efConstruction = HNSW_CONSTRUCTION

    def begin(self, path: Path) -> None:
        """Start writing the index to a new file."""
        self._path, self._scratch = path, path.with_name(f"{path.name}.scratch")
        if self._flat:
            self._file = path.open("xb")
            self._file.write(self._flat_header(0))
        elif self._graph is None:
            self._file = self._scratch.open("xb")

    def add(self, keys: NDArray[np.float32]) -> None:
        """Add finite keys, float32 (n, d), in the order of their records."""
        if not len(keys):
            return
        if self._graph is not None:
            self._graph.add(np.ascontiguousarray(keys))
        else:
            assert self._file is not None
            self._file.write(np.ascontiguousarray(keys).data)
        self.size += len(keys)

    def finish(self) -> None:
        """Complete the file.

        Raises:
            KnowledgeBaseError: faiss could not write it, for example because the disk is full.

        """
        if self._graph is not None:
            try:
                load_faiss().write_index(self._graph, str(self._path))
            except RuntimeError as error:
                problem = f"faiss cannot write the keys ({one_line(error)}): check the disk"
                raise KnowledgeBaseError(f"{self._path}: {problem}") from error
            return
        assert self._file is not None
        if self._flat:
            self._file.seek(0)
            self._file.write(self._flat_header(self.size))
        self._file.close()
        if not self._flat:
            self._write_lists()
            self._scratch.unlink()

    def close(self) -> None:
        """Close what is open; the file is unusable unless `finish` was called before."""
        if self._file is not None:
            with suppress(OSError):  # a full disk; unwritten data is discarded here anyway
                self._file.close()

    def _flat_header(self, size: int) -> bytes:
        index = load_faiss().IndexFlatL2(self._key_dim)
        index.ntotal = size
        return _serialized(index)[: -COUNT.size] + COUNT.pack(size * self._key_dim)

    def _check_format(self) -> None:
        """Compare a header of this module with faiss' own."""
        faiss, keys = load_faiss(), np.ones((2, self._key_dim), np.float32)
        index = faiss.IndexFlatL2(self._key_dim)
        index.add(keys)
        if self._flat_header(2) + keys.tobytes() != _serialized(index):
            raise _unknown_format()

    def _blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """All keys in the order of their records, with the number of the first in each block."""
        for start in range(0, self.size, BLOCK):
            count = min(BLOCK, self.size - start) * self._key_dim
            offset = start * self._key_dim * np.float32().itemsize
            yield start, np.fromfile(self._scratch, np.float32, count, offset=offset).reshape(-1, self._key_dim)

    def _fitted(self) -> Any:
        """An ivf index without keys whose clusters are fitted to a random sample."""
        lists = list_count(self.size)
        # equal keys make equal files: the draw is fixed
        wanted = min(self.size, max(TRAINING_KEYS, KEYS_OF_A_LIST * lists))
        rows = np.sort(np.random.default_rng(0).choice(self.size, wanted, replace=False, shuffle=False))
        sample = np.empty((wanted, self._key_dim), np.float32)
        for start, keys in self._blocks():
            first, last = np.searchsorted(rows, (start, start + len(keys)))
            sample[first:last] = keys[rows[first:last] - start]
        index = self._inverted(lists)
        index.cp.min_points_per_centroid = 1  # else faiss prints a warning for fewer than 39 keys
        index.train(sample)
        return index

    def _inverted(self, lists: int) -> Any:
        """An ivf index whose clusters are not fitted."""
        faiss = load_faiss()
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(self._key_dim), self._key_dim, lists, faiss.METRIC_L2)

    def _write_lists(self) -> None:
        """Write the ivf index: its header, the length of each list, and of each list its keys and their records."""
        index = self._fitted()
        assigned = np.empty(self.size, np.int32)
        for start, keys in self._blocks():
            assigned[start : start + len(keys)] = index.quantizer.search(keys, 1)[1][:, 0]
        lengths = np.bincount(assigned, minlength=index.nlist)
        order = np.argsort(assigned, kind="stable")
        del assigned
        place = np.empty(self.size, np.int64)
        place[order] = np.arange(self.size)
        starts, ends = [0, *np.cumsum(lengths).tolist()[:-1]], np.cumsum(lengths).tolist()
        room = max(1, GROUP // (self._key_dim * np.float32().itemsize))
        with self._path.open("xb") as file:
            file.write(_lists_header(index, lengths))
            number = written = 0
            for begin in range(0, self.size, room):
                end = min(begin + room, self.size)
                group = self._gather(place, begin, end)
                while number < index.nlist:
                    stop = min(ends[number], end)
                    file.write(group[written - begin : stop - begin].tobytes())
                    written = stop
                    if ends[number] > end:
                        # the rest of this list is in the next group
                        break
                    file.write(order[starts[number] : ends[number]].tobytes())
                    number += 1

    def _gather(self, place: NDArray[np.int64], begin: int, end: int) -> NDArray[np.float32]:
        """The keys at places begin..end-1 in the order of the lists, float32 (end - begin, d)."""
        group = np.empty((end - begin, self._key_dim), np.float32)
        for start, keys in self._blocks():
            to = place[start : start + len(keys)]
            inside = (to >= begin) & (to < end)
            group[to[inside] - begin] = keys[inside]
        return group


def _lists_header(index: Any, lengths: NDArray[np.int64]) -> bytes:
    """All that faiss writes of a fitted ivf index before the contents of lists of these lengths."""
    index.ntotal = int(lengths.sum())
    empty = _serialized(index)
    known = b"ilar" + COUNT.pack(index.nlist) + COUNT.pack(index.code_size)
    if empty[-NO_LISTS:] != known + b"sprs" + COUNT.pack(0):
        raise _unknown_format()
    return empty[:-NO_LISTS] + known + b"full" + COUNT.pack(len(lengths)) + lengths.astype("<u8").tobytes()


def _serialized(index: Any) -> bytes:
    return bytes(load_faiss().serialize_index(index).tobytes())


def _unknown_format() -> KnowledgeBaseError:
    version = load_faiss().__version__
    return KnowledgeBaseError(
        f"faiss {version} writes index files in a form that is not known here: install faiss 1.15, or use hnsw"
    )
