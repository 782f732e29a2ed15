"""Nearest neighbours between two sets of images, by the l2 distance of their pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.errors import InputError

BLOCK = 128 << 20
"""Bytes of each set that are held as float64 at a time."""
MOST_ROWS = 4096
"""Images of each set at a time, at most: the distances of a block have their square."""


@dataclass(frozen=True)
class Nearest:
    """The nearest reference image of each of N queries.

    Attributes:
        indices: int64 (N,), into the references.
        distances: float64 (N,), l2 over pixels and channels with values in [0, 1].
    """

    indices: NDArray[np.int64]
    distances: NDArray[np.float64]


def nearest_images(
    queries: NDArray[np.uint8],
    references: NDArray[np.uint8],
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] | None = None,
    *,
    same: bool = False,
) -> Nearest:
    """Search exactly, in blocks: sums of products of bytes are integers, which float64 holds without rounding.

    Args:
        queries: uint8 (N, H, W) or (N, H, W, 3).
        references: uint8, M images of the same shape, M >= 1.
        device: where to compute.
        advance: called with the number of queries just done, N in total.
        same: `queries` and `references` are one set, so an image must not be its own neighbour.

    Raises:
        InputError: no reference is left to compare with.
    """
    if len(references) < 1 + same:
        raise InputError("", "there are no images to compare with; give more images")
    indices = np.empty(len(queries), np.int64)
    distances = np.empty(len(queries), np.float64)
    norms = torch.cat([_flat(part, device).square().sum(1) for part in _parts(references)])
    first = 0
    for part in _parts(queries):
        rows = _flat(part, device)
        found, values = _search(rows, references, norms, first if same else None)
        indices[first : first + len(part)] = found.cpu().numpy()
        distances[first : first + len(part)] = (values + rows.square().sum(1)).sqrt().cpu().numpy() / 255
        first += len(part)
        if advance is not None:
            advance(len(part))
    return Nearest(indices, distances)


def _search(queries: Tensor, references: NDArray[np.uint8], norms: Tensor, own: int | None) -> tuple[Tensor, Tensor]:
    """Index of the nearest reference r of each query q, and |r|^2 - 2 q.r.

    If `own` is given, reference own + n is query n and is skipped.
    """
    best = torch.full((len(queries),), torch.inf, dtype=torch.float64, device=queries.device)
    found = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    rows = torch.arange(len(queries), device=queries.device)
    start = 0
    for part in _parts(references):
        # without |q|^2, which is the same for all references
        distances = torch.addmm(norms[start : start + len(part)], queries, _flat(part, queries.device).T, alpha=-2)
        if own is not None:
            columns = own + rows - start
            mine = (columns >= 0) & (columns < len(part))
            distances[rows[mine], columns[mine]] = torch.inf
        values, columns = distances.min(1)
        nearer = values < best
        best = torch.where(nearer, values, best)
        found = torch.where(nearer, columns + start, found)
        start += len(part)
    return found, best


def _parts(images: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    rows = min(MOST_ROWS, max(1, BLOCK // (8 * math.prod(images.shape[1:]))))
    return [images[start : start + rows] for start in range(0, len(images), rows)]


def _flat(images: NDArray[np.uint8], device: torch.device | str) -> Tensor:
    return torch.from_numpy(images.reshape(len(images), -1)).to(device).double()
