"""Trajectories of models that make an image in one network call, such as a GAN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rapid.precision import exact_float32
from rapid.sampling.generator import Finished
from rapid.sampling.streams import Streams, make_streams

Sample = Callable[[Streams, NDArray[np.int64] | None], Tensor]
"""(noise streams of n candidates, their classes int64 (n,) or None) -> latents, float (n, ...)."""


class OneCallTrajectories:
    """Rows that are finished by their first `advance`; implements `rapid.sampling.generator.Trajectories`.

    Args:
        sample: the network call; a row must not depend on the other rows.
    """

    search_seconds = 0.0

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._waiting: dict[int, tuple[np.random.Generator, int | None]] = {}
        self._next = 0

    def begin(
        self,
        seeds: int | NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        steps: int | None = None,
    ) -> NDArray[np.int64]:
        """See `Trajectories.begin`; `steps` makes no difference."""
        rows = np.arange(self._next, self._next + len(numbers))
        self._next += len(numbers)
        own = [None] * len(rows) if labels is None else labels.tolist()
        streams = make_streams(seeds, numbers) if len(numbers) else []
        self._waiting.update(zip(rows.tolist(), zip(streams, own, strict=True), strict=True))
        return rows

    @exact_float32()
    def advance(self, rows: NDArray[np.int64]) -> Finished:
        """See `Trajectories.advance`: all of `rows` are finished."""
        waiting = [self._waiting.pop(row) for row in rows.tolist()]
        labels = [label for _, label in waiting if label is not None]
        chosen = np.array(labels, np.int64) if len(labels) == len(waiting) else None
        latents = self._sample([stream for stream, _ in waiting], chosen)
        return Finished(rows, latents, np.full(len(rows), -1, np.int64))

    def drop(self, rows: NDArray[np.int64]) -> None:
        """See `Trajectories.drop`."""
        for row in rows.tolist():
            del self._waiting[row]
