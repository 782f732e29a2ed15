"""The keys: a faiss index that is built batch by batch and searched row by row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptKnowledgeBase, KnowledgeBaseError
from .manifest import IndexType, Manifest

LARGEST = 1e15  # bound on |key| and |query|, so that squared distances stay finite in float32
TRAINING_KEYS = 100_000  # ivf: clusters are fitted to at most this many keys, the first ones
HNSW_LINKS, HNSW_CONSTRUCTION, HNSW_SEARCH = 32, 100, 128
IVF_PROBES = 16  # ivf: number of clusters searched, or one in 16 of them if that is more
# Rows handed to faiss at once. For larger batches faiss uses matrix products, whose rounding depends on the batch size.
ROWS, NUMBERS = 16, 100_000


@cache
def load_faiss() -> Any:
    """The faiss module.

    Raises:
        KnowledgeBaseError: it is not installed, or does not load.

    """
    try:
        import faiss
    except ImportError as error:
        raise KnowledgeBaseError(
            f"faiss cannot be imported ({error}): pip install faiss-cpu, or one of the extras [cpu] and [gpu]"
        ) from error
    return faiss


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The nearest records of n queries, nearest first.

    Attributes:
        indices: int64 (n, m), each in 0..size-1.
        distances: float32 (n, m), squared l2.

    """

    indices: NDArray[np.int64]
    distances: NDArray[np.float32]


class KeyIndexBuilder:
    """Puts keys into a faiss index batch by batch.

    Args:
        index_type: ``flat``, ``hnsw`` or ``ivf``.
        key_dim: length d of a key.

    ``ivf`` keeps up to ``TRAINING_KEYS`` keys back until it can fit its clusters. They are the first keys: the index
    is searchable for any order of the records, but faster for a random order.

    """

    def __init__(self, index_type: IndexType, key_dim: int) -> None:
        faiss = load_faiss()
        self._key_dim = key_dim
        self._pending: list[NDArray[np.float32]] = []
        self._index: Any = None  # ivf: until it is trained
        if index_type == "flat":
            self._index = faiss.IndexFlatL2(key_dim)
        elif index_type == "hnsw":
            self._index = faiss.IndexHNSWFlat(key_dim, HNSW_LINKS)
            self._index.hnsw.efConstruction = HNSW_CONSTRUCTION

    def __len__(self) -> int:
        """Keys added so far."""
        return sum(map(len, self._pending)) + (0 if self._index is None else int(self._index.ntotal))

    def add(self, keys: NDArray[np.float32]) -> None:
        """Add finite keys, float32 (n, d), in the order of their records."""
        if self._index is None:
            room = TRAINING_KEYS - len(self)
            self._pending.append(keys[:room].copy())
            keys = keys[room:]
            if len(self) == TRAINING_KEYS:
                self._train()
        if len(keys):
            self._index.add(np.ascontiguousarray(keys))

    def write(self, path: Path) -> None:
        """Write the index to a file.

        Raises:
            KnowledgeBaseError: faiss could not write it, for example because the disk is full.

        """
        if self._index is None:
            self._train()
        try:
            load_faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise KnowledgeBaseError(
                f"{path}: faiss cannot write the keys ({one_line(error)}): check the disk"
            ) from error

    def _train(self) -> None:
        """Fit the clusters of ivf: 4 sqrt(n) of them, and 39 keys or more to each, as faiss advises."""
        faiss = load_faiss()
        keys = np.concatenate(self._pending)
        clusters = max(1, min(int(4 * len(keys) ** 0.5), len(keys) // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(self._key_dim), self._key_dim, clusters, faiss.METRIC_L2)
        index.cp.min_points_per_centroid = 1  # else faiss prints a warning for fewer than 39 keys
        index.train(keys)
        index.add(keys)
        self._index, self._pending = index, []


class KeyIndex:
    """A finished index of keys, read from a file.

    Formal guarantees of ``search``, on which the privacy analysis of callers may rely:

    - Row i of the answer is a function of query i, of ``neighbours`` and of the index alone. It depends neither on the
      other rows, nor on their number, nor on threads: queries go to faiss in small groups, below the size where faiss
      switches to an algorithm that rounds differently and would swap records at almost the same distance.
    - No value of a query makes it fail. Non-finite numbers count as 0 and numbers beyond +-1e15 as +-1e15, so
      every query has neighbours. One private example must not decide whether a program continues.

    Running time is not covered: approximate indices search again, exactly, for queries with too few neighbours.
    """

    def __init__(self, index: Any, index_type: IndexType, path: Path) -> None:
        self._index = index
        self._index_type = index_type
        self._path = path

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> KeyIndex:
        """Read the index that ``manifest`` describes; check the hash first, faiss is not safe on altered files.

        Raises:
            CorruptKnowledgeBase: faiss cannot read it, or it is not the described index.

        """
        faiss = load_faiss()
        try:
            index = faiss.read_index(str(path))
        except (RuntimeError, MemoryError) as error:
            raise CorruptKnowledgeBase(f"{path}: faiss cannot read it ({one_line(error)}): build it again") from error
        kinds = {"flat": faiss.IndexFlat, "hnsw": faiss.IndexHNSWFlat, "ivf": faiss.IndexIVFFlat}
        found = (type(index).__name__, index.d, index.ntotal)
        fits = isinstance(index, kinds[manifest.index_type]) and found[1:] == (manifest.key_dim, manifest.size)
        if not fits or index.metric_type != faiss.METRIC_L2:
            raise CorruptKnowledgeBase(
                f"{path}: holds {found[0]} of {found[2]} keys of length {found[1]}, the manifest says l2 "
                f"{manifest.index_type} of {manifest.size} keys of length {manifest.key_dim}: build it again"
            )
        return cls(index, manifest.index_type, path)

    def search(self, queries: NDArray[np.float32], neighbours: int = 1) -> Neighbours:
        """Find the nearest keys of each query.

        Args:
            queries: float32 (n, d); any values, any n including 0.
            neighbours: m, records to find for each query, 1 <= m <= size.

        Returns:
            ``Neighbours`` of shape (n, m).

        Raises:
            ValueError: wrong shape, dtype or number of neighbours.
            CorruptKnowledgeBase: the keys in the file are not finite.

        """
        size, dim = self._index.ntotal, self._index.d
        if not isinstance(queries, np.ndarray) or queries.dtype != np.float32:
            raise ValueError(
                f"queries must be a numpy array of float32, not {getattr(queries, 'dtype', type(queries))}"
            )
        if queries.ndim != 2 or queries.shape[1] != dim:
            raise ValueError(f"queries must have shape (n, {dim}), not {queries.shape}")
        if not 1 <= neighbours <= size:
            raise ValueError(f"neighbours must be in 1..{size} (the size of the knowledge base), not {neighbours}")
        finite = np.clip(np.nan_to_num(queries, nan=0.0, posinf=0.0, neginf=0.0), -LARGEST, LARGEST, dtype=np.float32)
        finite = np.ascontiguousarray(finite)
        indices = np.empty((len(queries), neighbours), np.int64)
        distances = np.empty((len(queries), neighbours), np.float32)
        step = max(1, min(ROWS, NUMBERS // dim))
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            distances[rows], indices[rows] = self._search_rows(finite[rows], neighbours)
        if (indices < 0).any():
            raise CorruptKnowledgeBase(f"{self._path}: has keys that are not finite: build it again")
        return Neighbours(indices, distances)

    def _search_rows(self, queries: NDArray[np.float32], neighbours: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Search for at most ``ROWS`` queries; those that found too few (index -1) are searched again, exactly."""
        faiss, index = load_faiss(), self._index
        if self._index_type == "flat":
            quick, exact, everything = None, index, None
        elif self._index_type == "hnsw":
            quick = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, 2 * neighbours))
            exact, everything = faiss.downcast_index(index.storage), None
        else:
            quick = faiss.SearchParametersIVF(nprobe=min(index.nlist, max(IVF_PROBES, index.nlist // 16)))
            exact, everything = index, faiss.SearchParametersIVF(nprobe=index.nlist)
        distances, indices = index.search(queries, neighbours, params=quick)
        short = (indices < 0).any(axis=1)
        if short.any() and self._index_type != "flat":
            distances[short], indices[short] = exact.search(queries[short], neighbours, params=everything)
        return distances, indices


def one_line(error: Exception) -> str:
    """The last line of a faiss message; the lines before name its source files."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
