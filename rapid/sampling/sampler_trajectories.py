"""Trajectories of the samplers of `rapid.diffusion.samplers`: candidates at different calls share one batch.

Stochastic samplers take fresh noise between their calls, each row from its own stream. So an image depends on its seed,
number, label and steps alone, as with deterministic ones.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.diffusion.samplers import Path, apply_call
from rapid.precision import exact_float32
from rapid.sampling.generator import Finished
from rapid.sampling.streams import Streams, make_streams, normal

MIN_ROWS = 32


class DenoisingModel(Protocol):
    """What a method supplies."""

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of a state."""
        ...

    def path(self, steps: int | None = None) -> Path:
        """The calls of an image with so many steps, the same object for equal steps; None takes the default."""
        ...

    def denoise(self, x: Tensor, sigma: Tensor, labels: NDArray[np.int64] | None) -> Tensor:
        """D(x; sigma), float (n, *latent_shape).

        Args:
            x: states, float (n, *latent_shape).
            sigma: their levels, float (n,).
            labels: their classes, int64 (n,); None without classes.
        """
        ...


class SamplerTrajectories:
    """Rows of one model; implements `rapid.sampling.generator.Trajectories`."""

    search_seconds = 0.0

    def __init__(self, model: DenoisingModel) -> None:
        self._model = model
        device = model.device
        # one line for each call of each known path
        self._first: dict[Path, int] = {}
        self._sigmas = torch.zeros(0, device=device)
        self._weights = torch.zeros(0, 2, 4, device=device)
        self._noisy, self._last = np.zeros(0, bool), np.zeros(0, bool)
        # one line for each row
        self._x = torch.zeros(0, *model.latent_shape, device=device)
        self._kept = self._x.clone()
        self._call, self._labels = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._labelled = False
        self._streams: dict[int, np.random.Generator] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Number of rows in flight."""
        return len(self._streams)

    def begin(
        self,
        seeds: int | NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        steps: int | None = None,
    ) -> NDArray[np.int64]:
        """Start candidates; see the protocol."""
        path = self._model.path(steps)
        first = self._learn(path)
        rows = self._take(len(numbers))
        if not len(rows):
            return rows
        streams = make_streams(seeds, numbers)
        self._streams.update(zip(rows.tolist(), streams, strict=True))
        self._labelled = labels is not None
        self._labels[rows] = -1 if labels is None else labels
        self._call[rows] = first
        places = torch.from_numpy(rows).to(self._x.device)
        self._x[places] = path.first_level * self._normal(streams)
        # its weight is 0 at first, but 0 times a NaN left by an earlier row would be NaN
        self._kept[places] = 0
        return rows

    @torch.no_grad()
    @exact_float32()
    def advance(self, rows: NDArray[np.int64]) -> Finished:
        """Advance distinct rows by one network call each; see the protocol."""
        device = self._x.device
        places, calls = torch.from_numpy(rows).to(device), torch.from_numpy(self._call[rows]).to(device)
        x = self._x[places]
        denoised = self._model.denoise(x, self._sigmas[calls], self._labels[rows] if self._labelled else None)
        noise = self._noise(rows)
        x, kept = apply_call(self._weights[calls], x, self._kept[places], denoised, noise)
        self._x[places], self._kept[places] = x, kept
        done = self._last[self._call[rows]]
        self._call[rows] += 1
        self.drop(rows[done])
        return Finished(rows[done], x[torch.from_numpy(done).to(device)], np.full(done.sum(), -1, np.int64))

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Abandon rows; see the protocol."""
        for row in rows.tolist():
            del self._streams[row]
        self._free += rows.tolist()

    def _learn(self, path: Path) -> int:
        """Append the calls of a path to the tables, if it is new; return the index of its first call."""
        if path not in self._first:
            self._first[path] = len(self._sigmas)
            device = self._sigmas.device
            self._sigmas = torch.cat([self._sigmas, path.sigmas.to(device)])
            self._weights = torch.cat([self._weights, path.weights.to(device)])
            self._noisy = np.concatenate([self._noisy, path.noisy])
            self._last = np.concatenate([self._last, np.arange(len(path)) == len(path) - 1])
        return self._first[path]

    def _noise(self, rows: NDArray[np.int64]) -> Tensor:
        """Fresh noise for the rows whose calls need it, zeros for the others."""
        needed = self._noisy[self._call[rows]]
        if needed.all():
            return self._normal([self._streams[row] for row in rows.tolist()])
        noise = torch.zeros(len(rows), *self._x.shape[1:], device=self._x.device)
        if needed.any():
            drawn = self._normal([self._streams[row] for row in rows[needed].tolist()])
            noise[torch.from_numpy(needed).to(noise.device)] = drawn
        return noise

    def _normal(self, streams: Streams) -> Tensor:
        return torch.from_numpy(normal(streams, self._model.latent_shape)).to(self._x.device)

    def _take(self, count: int) -> NDArray[np.int64]:
        """Take free rows; the tables at least double when there are too few."""
        if len(self._free) < count:
            size = len(self._call)
            more = max(count, size, MIN_ROWS)
            self._x, self._kept = (torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in (self._x, self._kept))
            empty = np.zeros(more, np.int64)
            self._call, self._labels = (np.concatenate([table, empty]) for table in (self._call, self._labels))
            self._free += range(size, size + more)
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int64)
