"""Prints of images, small grey thumbnails, and the rule by which two images are near-duplicates.

It is meant for copies: the same image stored again, as JPEG, with a little noise, brighter or of more contrast. One
that is moved by a pixel, turned, mirrored or cropped has another print, and is not found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from rapid.data.fit import LUMA

SIDE = 16
LENGTH = SIDE * SIDE
"""Bytes of a print."""
LIKENESS = 0.996
"""Least correlation of the thumbnails of near-duplicates. Of characters of 32x32 pixels, copies reach 0.998 (as JPEG of
quality 75, with noise of 8 grey levels), and 60,000 digits 0.990 at most with the most similar of 82,000 letters. Of
10,000 digits two reach 0.996 with one of 60,000 others, both of the figure 1."""
FAINTEST = 8.0
"""Least standard deviation of a print, in grey levels. Fainter ones are alike by chance, so they are like none."""
NORM = 4000
"""Length of a compared print. Its whole numbers give sums under 2^24, exact in float32 in whatever order."""
BLOCK = 4096
"""Prints of each side that are compared at a time."""


def thumbnails(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Mean luma of each cell of a 16x16 grid, rounded; a function of each image alone.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3), of any size; cells are of whole pixels, and overlap where 16 does not
            divide the side.

    Returns:
        uint8 (N, 256).
    """
    made = np.empty((len(images), LENGTH), np.uint8)
    for start in range(0, len(images), BLOCK):
        part = images[start : start + BLOCK]
        luma = torch.from_numpy((part @ LUMA if part.ndim == 4 else part).astype(np.float32))
        cells = F.adaptive_avg_pool2d(luma[:, None], SIDE)
        made[start : start + BLOCK] = cells.round().flatten(1).to(torch.uint8).numpy()
    return made


def near_duplicates(
    queries: NDArray[np.uint8], references: NDArray[np.uint8], advance: Callable[[int], None] | None = None
) -> NDArray[np.bool_]:
    """Which queries are a near-duplicate of some reference: the correlation of the two thumbnails is LIKENESS or more.

    Formal guarantee: answer n is a function of query n and of the references alone, without rounding that depends on
    the other queries. Rounding moves a correlation by a ten-thousandth or so.

    Args:
        queries: thumbnails, uint8 (N, 256).
        references: thumbnails, uint8 (M, 256).
        advance: called with the number of queries done, N in all.

    Returns:
        bool (N,).
    """
    found = np.zeros(len(queries), np.bool_)
    for start in range(0, len(queries), BLOCK):
        rows = slice(start, start + BLOCK)
        asked = _compared(queries[rows])
        for other in range(0, len(references), BLOCK):
            products = asked @ _compared(references[other : other + BLOCK]).T
            found[rows] |= products.max(1) >= LIKENESS * NORM**2
        if advance is not None:
            advance(len(asked))
    return found


def _compared(part: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Prints less their means, scaled to NORM and rounded to whole numbers; zeros for faint ones."""
    centred = part - part.mean(1, keepdims=True, dtype=np.float32)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    faint = lengths < FAINTEST * SIDE
    scaled = centred * np.where(faint, np.float32(0), NORM / np.maximum(lengths, 1))
    # what one cell loses by rounding the next one gets: alike errors on an even ground would add up
    return np.diff(np.rint(np.cumsum(scaled, axis=1)), axis=1, prepend=np.float32(0))
