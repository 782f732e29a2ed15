"""Thumbnails of 16x16 grey pixels, and the rule that decides whether two images are near-duplicates.

The rule finds copies: the same image compressed as JPEG, with a little noise, brighter, or with more contrast. It does
not find images that were shifted by a pixel, rotated, mirrored or cropped: their thumbnails differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from rapid.data.fit import LUMA
from rapid.mapped import blocks, empty

SIDE = 16
LENGTH = SIDE * SIDE
"""Bytes of a thumbnail."""
LIKENESS = 0.996
"""Least correlation between the thumbnails of near-duplicates. Measured on characters of 32x32 pixels: copies reach
0.998 (JPEG of quality 75, noise of 8 grey levels); 60,000 digits reach at most 0.990 with their most similar of 82,000
letters. Of 10,000 digits, two reach 0.996 with one of 60,000 other digits; both show a 1."""
FAINTEST = 8.0
"""Least standard deviation of a thumbnail, in grey levels. Fainter ones correlate by chance, so they never match."""
NORM = 4000
"""Norm of a thumbnail when compared: integers whose sums stay below 2^24 are exact in float32, in any order."""
BLOCK = 4096
"""Thumbnails compared at a time, of the queries and of the references."""


def thumbnails(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Compute the mean luma of each cell of a 16x16 grid, rounded. Each thumbnail depends on its own image only.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3), of any size. Cells consist of whole pixels and overlap if 16 does not
            divide the side.

    Returns:
        uint8 (N, 256).
    """
    made = np.empty((len(images), LENGTH), np.uint8)
    start = 0
    for part in blocks(images):
        luma = torch.from_numpy((part @ LUMA if part.ndim == 4 else part).astype(np.float32))
        cells = F.adaptive_avg_pool2d(luma[:, None], SIDE)
        made[start : start + len(part)] = cells.round().flatten(1).to(torch.uint8).numpy()
        start += len(part)
    return made


class NearDuplicates:
    """Finds thumbnails that are near-duplicates of a reference: they correlate by LIKENESS or more.

    Args:
        references: thumbnails, uint8 (M, 256); twice their size is held, mapped from a file if it is large.
    """

    def __init__(self, references: NDArray[np.uint8]) -> None:
        self._given = references

    @cached_property
    def _references(self) -> NDArray[np.int16]:
        made = empty((len(self._given), LENGTH), np.int16)
        for start in range(0, len(made), BLOCK):
            made[start : start + BLOCK] = _compared(self._given[start : start + BLOCK])
        return made

    def among(self, queries: NDArray[np.uint8], advance: Callable[[int], None] | None = None) -> NDArray[np.bool_]:
        """Find the queries that are near-duplicates.

        Formal guarantee: answer n is a function of query n and the references only; no rounding depends on the other
        queries. Rounding changes a correlation by about 1e-4.

        Args:
            queries: thumbnails, uint8 (N, 256).
            advance: called with the number of queries just done, N in total.

        Returns:
            bool (N,).
        """
        found = np.zeros(len(queries), np.bool_)
        for start in range(0, len(queries), BLOCK):
            rows = slice(start, start + BLOCK)
            asked = _compared(queries[rows])
            for other in range(0, len(self._references), BLOCK):
                products = asked @ self._references[other : other + BLOCK].astype(np.float32).T
                found[rows] |= products.max(1) >= LIKENESS * NORM**2
            if advance is not None:
                advance(len(asked))
        return found


def _compared(part: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Thumbnails centred, scaled to norm NORM and rounded to integers; zeros for faint ones."""
    centred = part - part.mean(1, keepdims=True, dtype=np.float32)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    faint = lengths < FAINTEST * SIDE
    scaled = centred * np.where(faint, np.float32(0), NORM / np.maximum(lengths, 1))
    # carry the rounding error of each cell to the next: equal errors on a uniform background would add up
    return np.diff(np.rint(np.cumsum(scaled, axis=1)), axis=1, prepend=np.float32(0))
