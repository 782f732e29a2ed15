"""Some rows of a large array, which are copied only when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Subset:
    """Some images of a set, in an order of their own.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3).
        rows: which of them, int64 (n,).
    """

    def __init__(self, images: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
        self._images = images
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: slice | NDArray[Any]) -> NDArray[np.uint8]:
        """A copy of some of them, uint8 (n, H, W) or (n, H, W, 3)."""
        return self._images[self._rows[index]]


Images = NDArray[np.uint8] | Subset
"""Images that are read some at a time."""
