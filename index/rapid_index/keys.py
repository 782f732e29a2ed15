"""The keys: a faiss index that is searched row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptKnowledgeBase, KnowledgeBaseError
from .manifest import IndexType, Manifest

LARGEST = 1e15  # bound on |key| and |query|, so that squared distances stay finite in float32
HNSW_SEARCH = 128
IVF_PROBES = 16  # ivf: number of lists searched, at least; see `probe_count`
GPU_NEIGHBOURS = 2048  # that faiss finds on a GPU, at most
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


def probe_count(lists: int) -> int:
    """Number of lists that ivf searches for a query, of `lists`: 2 sqrt(lists), and 16 at least.

    With 4 sqrt(size) lists a query is compared with about size^(3/4) keys: 5,600 of 100,000, and 178,000 of 10 million.
    """
    return min(lists, max(IVF_PROBES, math.isqrt(4 * lists)))


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
        self._quick = index  # searches first: the same one, or a copy on a GPU
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
            # lists stay on disk, where several processes share them
            flags = faiss.IO_FLAG_MMAP if manifest.index_type == "ivf" else 0
            index = faiss.read_index(str(path), flags)
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
        if manifest.index_type == "ivf":
            # a thread for each list, which costs more than it saves
            faiss.downcast_InvertedLists(index.invlists).prefetch_nthread = 0
        return cls(index, manifest.index_type, path)

    def flat(self) -> NDArray[np.float32] | None:
        """The keys as faiss holds them, float32 (size, d), if the index is flat; not copied."""
        if self._index_type != "flat":
            return None
        index = self._index
        keys: NDArray[np.float32] = load_faiss().rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
        return np.asarray(_Held(keys, index)).reshape(index.ntotal, index.d)

    def copy_to(self, move: Callable[[Any], Any]) -> None:
        """Search a copy of an ivf index, made by `move`, and this one only for what the copy does not find."""
        self._quick = move(self._index)

    def search(self, queries: NDArray[np.float32], neighbours: int = 1, *, exact: bool = False) -> Neighbours:
        """Find the nearest keys of each query.

        Args:
            queries: float32 (n, d); any values, any n including 0.
            neighbours: m, records to find for each query, 1 <= m <= size.
            exact: compare with every key, whatever the index.

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
            distances[rows], indices[rows] = self._search_rows(finite[rows], neighbours, exact)
        if (indices < 0).any():
            raise CorruptKnowledgeBase(f"{self._path}: has keys that are not finite: build it again")
        return Neighbours(indices, distances)

    def _search_rows(
        self, queries: NDArray[np.float32], neighbours: int, exact: bool
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Search for at most ``ROWS`` queries; those that found too few (index -1) are searched again, exactly."""
        faiss, index = load_faiss(), self._index
        if self._index_type == "flat":
            quick, whole, everything = None, index, None
        elif self._index_type == "hnsw":
            quick = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, 2 * neighbours))
            whole, everything = faiss.downcast_index(index.storage), None
        else:
            quick = faiss.SearchParametersIVF(nprobe=probe_count(index.nlist))
            whole, everything = index, faiss.SearchParametersIVF(nprobe=index.nlist)
        if exact:
            distances, indices = whole.search(queries, neighbours, params=everything)
            return distances, indices
        first = index if neighbours > GPU_NEIGHBOURS else self._quick
        distances, indices = first.search(queries, neighbours, params=quick)
        short = (indices < 0).any(axis=1)
        if short.any() and self._index_type != "flat":
            distances[short], indices[short] = whole.search(queries[short], neighbours, params=everything)
        return distances, indices


class _Held:
    """Numbers in the memory of another object, which lives as long as an array of them."""

    def __init__(self, numbers: NDArray[np.float32], owner: Any) -> None:
        self.__array_interface__ = numbers.__array_interface__
        self._owner = owner


def one_line(error: Exception) -> str:
    """The last line of a faiss message; the lines before name its source files."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
