"""Noise streams: one independent random generator for each candidate, keyed by the seed and the candidate's number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_SEED = 2**63 - 1

Streams = Sequence[np.random.Generator]
"""One generator per row; a row's draws do not depend on the other rows."""


def make_streams(seeds: int | NDArray[np.int64], numbers: NDArray[np.int64]) -> Streams:
    """New streams, each at its beginning.

    Args:
        seeds: one seed for all candidates, or one for each, int64 (n,); 0..2^63 - 1.
        numbers: numbers of the candidates, int64 (n,), >= 0.

    Returns:
        n Philox generators with the key (seed, number).
    """
    keys = np.stack(np.broadcast_arrays(np.asarray(seeds, np.uint64), numbers.astype(np.uint64)), 1)
    return [np.random.Generator(np.random.Philox(key=key)) for key in keys]


def normal(streams: Streams, shape: Sequence[int]) -> NDArray[np.float32]:
    """Draw the next standard normal array of each stream, float32 (n, *shape); n may be 0."""
    drawn = np.empty((len(streams), *shape), np.float32)
    for row, stream in enumerate(streams):
        drawn[row] = stream.standard_normal(shape, np.float32)
    return drawn
