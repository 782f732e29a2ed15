"""Sums of clipped rows, one row after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def clipped_sum(rows: NDArray[np.floating], bound: float) -> NDArray[np.float64]:
    """The float64 sum of `rows` (n, ...), each scaled down to an l2 norm of at most `bound`; non-finite ones are 0.

    As stated for `clipped_rows`, a millionth of the bound is left for rounding.
    """
    bound /= 1 + 2.0**-20
    total = np.zeros(rows.shape[1:])
    for row in rows.astype(np.float64):
        if not np.isfinite(row).all():
            continue
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(row).sum()))
        total += row * (bound / norm if norm > bound else 1.0)
    return total
