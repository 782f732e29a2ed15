"""Search of a knowledge base for keys that networks make: exact by torch up to a million keys, else by the index."""

from __future__ import annotations

import warnings
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBase, move_to_gpu
from torch import Tensor

LIMIT = 1_000_000
"""Records up to which a flat index is searched by torch. Its keys are held twice on the device."""
LARGEST = 1e15
"""Bound on what counts of a query, as in `rapid_index`: squared distances stay finite in float32."""
ROWS, KEYS = 1024, 1 << 15
"""Queries and keys whose scores are made at a time: 128 MiB in float32."""
NUMBERS = 1 << 23
"""Numbers of float64 held at a time when candidates are compared."""
MARGIN, MORE = 16, 64
"""Candidates beyond twice the neighbours, and how many times as many are tried where these do not suffice."""


class Search(Protocol):
    """Finds the nearest records of queries."""

    def nearest(self, queries: Tensor, neighbours: int) -> NDArray[np.int64]:
        """Records, int64 (n, neighbours), nearest first, of queries, float (n, d) on any device."""


def open_search(knowledge_base: KnowledgeBase, device: torch.device, *, gpu_index: bool = False) -> Search:
    """The search that suits a knowledge base and a device.

    Args:
        knowledge_base: to be searched.
        device: where queries are made.
        gpu_index: let faiss search an ivf index on the GPU where its wheel can; a warning says so where it cannot.
            Its answers may depend on the batch, so this is for generation, never for private images.
    """
    keys = knowledge_base.flat_keys()
    if keys is not None and len(keys) <= LIMIT:
        return ExactSearch(keys, device)
    if gpu_index and device.type == "cuda" and knowledge_base.manifest.index_type == "ivf":
        number = device.index or 0
        problem = move_to_gpu(knowledge_base, number, beside=f"import torch; torch.ones(1, device={number}).item()")
        if problem:
            warnings.warn(f"the knowledge base is searched on the CPU: {problem}", stacklevel=2)
    return IndexSearch(knowledge_base)


class IndexSearch:
    """Search by the index of the knowledge base; see `rapid_index.keys.KeyIndex` for its guarantees."""

    def __init__(self, knowledge_base: KnowledgeBase) -> None:
        self._knowledge_base = knowledge_base

    def nearest(self, queries: Tensor, neighbours: int) -> NDArray[np.int64]:
        """See `Search`."""
        return self._knowledge_base.search(queries.float().cpu().numpy(), neighbours).indices


class ExactSearch:
    """The nearest records by squared distance in float64, found by matrix products in float32.

    Formal guarantees, on which the privacy analysis of callers may rely:

    - Row i of the answer is a function of query i, of `neighbours` and of the keys alone: the records of the smallest
      distances, equal ones in the order of their numbers. Distances are sums of float64 in a fixed order, the same to
      the last bit on every device. Neither other rows nor their number, tiles, threads or the precision of products
      matter.
    - No value of a query makes it fail. Non-finite numbers count as 0 and numbers beyond +-1e15 as +-1e15.

    Scores |a|^2 / 2 - a b of keys a and queries b, both minus the mean key, name some more candidates than are wanted,
    which are compared in float64. A bound on the rounding error of scores (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1) tells whether a record that is no candidate could be as near; such queries are
    searched again with more candidates, and at last with all records. That takes longer where many keys are equal:
    running time is not covered.

    Args:
        keys: float32 (size, d), finite, size >= 1; not copied on a CPU, and not to be changed.
        device: where to search.

    Raises:
        ValueError: keys are not finite.
    """

    def __init__(self, keys: NDArray[np.float32], device: torch.device) -> None:
        self._keys = torch.from_numpy(keys).to(device)
        centre = self._keys.mean(0, dtype=torch.float64)
        if not bool(centre.isfinite().all()):
            raise ValueError("keys must be finite")
        self._centre = centre
        self._shifted = torch.empty_like(self._keys)
        squares = torch.empty(len(keys), dtype=torch.float64, device=device)
        for start in range(0, len(keys), KEYS):
            rows = slice(start, start + KEYS)
            shifted = self._keys[rows].double() - centre
            self._shifted[rows] = shifted.float()
            squares[rows] = shifted.square().sum(1)
        self._halves = squares / 2
        self._radius = squares.max().sqrt()

    @torch.no_grad()
    def nearest(self, queries: Tensor, neighbours: int) -> NDArray[np.int64]:
        """See `Search`.

        Args:
            queries: float (n, d), any values; n may be 0.
            neighbours: 1 <= neighbours <= size.

        Raises:
            ValueError: wrong shape or number of neighbours.
        """
        size, dim = self._keys.shape
        if queries.ndim != 2 or queries.shape[1] != dim:
            raise ValueError(f"queries must have shape (n, {dim}), not {tuple(queries.shape)}")
        if not 1 <= neighbours <= size:
            raise ValueError(f"neighbours must be in 1..{size} (the size of the knowledge base), not {neighbours}")
        finite = torch.nan_to_num(queries.float().to(self._keys.device), 0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)
        found = np.empty((len(queries), neighbours), np.int64)
        left, count = np.arange(len(queries)), 2 * neighbours + MARGIN
        while len(left):
            again = []
            for part in np.split(left, range(ROWS, len(left), ROWS)):
                rows = finite if len(part) == len(finite) else finite[torch.from_numpy(part).to(finite.device)]
                answer = self._search(rows, neighbours, min(count, size)).cpu().numpy()
                found[part] = answer[:, :-1]
                again.append(part[answer[:, -1] == 0])
            left, count = np.concatenate(again), count * MORE
        return found

    def _search(self, queries: Tensor, neighbours: int, count: int) -> Tensor:
        """The nearest of `count` candidates for each query, and whether they are the nearest of all: (n, m + 1)."""
        shifted = queries.double() - self._centre
        scores, candidates = self._candidates(shifted, count)
        candidates = candidates.sort(dim=1).values
        distances, order = self._distances(queries, candidates).sort(dim=1, stable=True)
        nearest = candidates.gather(1, order[:, :neighbours])
        if count == len(self._keys):
            sure = torch.ones(len(queries), 1, dtype=torch.int64, device=nearest.device)
        else:
            own = shifted.square().sum(1)
            bound = self._error(own.sqrt(), scores.dtype)
            # of any other record the score is at least the largest of the candidates'
            others = scores.max(1).values.double() - bound + own / 2
            sure = (distances[:, neighbours - 1] / 2 < others).long()[:, None]
        return torch.cat([nearest, sure], dim=1)

    def _candidates(self, shifted: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scores, (n, count), and records of the `count` smallest; float64 where products of float32 are not exact."""
        dtype = torch.float64 if _products_are_rounded() else torch.float32
        rows = shifted.to(dtype)
        best: tuple[Tensor, Tensor] | None = None
        for start in range(0, len(self._keys), KEYS):
            tile = slice(start, start + KEYS)
            with torch.autocast(rows.device.type, enabled=False):
                scores = self._halves[tile].to(dtype) - rows @ self._shifted[tile].to(dtype).T
            values, places = scores.topk(min(count, scores.shape[1]), dim=1, largest=False, sorted=False)
            places = places + start
            if best is not None:
                values, places = torch.cat([best[0], values], dim=1), torch.cat([best[1], places], dim=1)
                values, chosen = values.topk(min(count, values.shape[1]), dim=1, largest=False, sorted=False)
                places = places.gather(1, chosen)
            best = values, places
        assert best is not None
        return best

    def _distances(self, queries: Tensor, records: Tensor) -> Tensor:
        """Squared distances, float64 (n, c), of queries, float32 (n, d), to records, (n, c)."""
        dim, result = queries.shape[1], torch.empty(records.shape, dtype=torch.float64, device=records.device)
        across = max(1, NUMBERS // dim)
        down = max(1, across // records.shape[1])
        for top in range(0, len(queries), down):
            for left in range(0, records.shape[1], across):
                part = (slice(top, top + down), slice(left, left + across))
                difference = queries[part[0], None].double() - self._keys[records[part]].double()
                result[part] = sum_in_order(difference.square())
        return result

    def _error(self, norms: Tensor, dtype: torch.dtype) -> Tensor:
        """Bound on the errors of scores and of half the distances, (n,), for queries of these norms, float64.

        With unit roundoff u, a product of length d is off by at most d u |a| |b| in any order of summation; rounding
        a and b to float32 adds 2 u |a| |b|, rounding |a|^2 / 2 and the difference about u (|a|^2 + |a| |b|). Underflow
        adds 2^-126 a term, where a device has no subnormal numbers.
        """
        dim = self._keys.shape[1]
        single, double = torch.finfo(torch.float32).eps / 2, torch.finfo(torch.float64).eps / 2
        scale = self._radius * (self._radius + norms)
        exact = 4 * (dim + 8) * double * (self._radius + norms) ** 2
        return 1.1 * (dim * torch.finfo(dtype).eps / 2 + 8 * single) * scale + exact + (dim + 8) * 2.0**-126


def sum_in_order(numbers: Tensor) -> Tensor:
    """Sums over the last axis, in an order that depends on its length alone, so that all devices agree to the last bit.

    The upper half is added to the lower one until one number is left.
    """
    while (length := numbers.shape[-1]) > 1:
        half = length // 2
        pairs = numbers[..., :half] + numbers[..., half : 2 * half]
        numbers = torch.cat([pairs, numbers[..., 2 * half :]], dim=-1) if length % 2 else pairs
    return numbers[..., 0]


def _products_are_rounded() -> bool:
    """Whether torch may round the factors of float32 products (TF32, bfloat16), by its older or its newer settings."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
    except RuntimeError:
        # the caller has used both kinds of settings
        return True
    backends = (torch.backends, torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return any(getattr(one, "fp32_precision", "none") not in ("none", "ieee") for one in backends)
