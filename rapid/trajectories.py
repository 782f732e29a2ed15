"""Many images on their way from noise, each at its own step: what a batch is made of can change at every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.generate import Generator, Start, streams


class Finished(NamedTuple):
    """Images that have arrived."""

    rows: NDArray[np.int64]
    """Which, (n,); they are free again."""
    images: NDArray[np.uint8]
    """(n, H, W) or (n, H, W, 3)."""
    entries: NDArray[np.int64]
    """The knowledge base's entry from which each began, (n,); -1 if it began with noise."""


class Trajectories:
    """The states of images of one generator, in rows.

    A row is its place in the tables of the solvers, what the solver has seen so far, a label and a noise stream.
    `advance` takes any of them one network call further, all in one batch (two, where some are still in the early
    steps). Those that reach step k are searched for together, and those that arrive are decoded together. What a row
    becomes does not depend on the others, but for rounding in the network: the same as `Generator.generate`.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        parts = [solver for solver in (generator.early, generator.late) if solver is not None]
        self._early = 0 if generator.early is None else len(generator.early.timesteps)
        self._steps = sum(len(part.timesteps) for part in parts)
        self._timesteps = np.array([t for part in parts for t in part.timesteps])
        self._public = (np.arange(self._steps) < self._early) | (self._timesteps > generator.trained)
        # the noise of a call is kept behind the first state of its part of the way
        self._kept = np.concatenate([np.arange(1, len(part.timesteps) + 1) for part in parts])
        self._width = int(self._kept.max()) + 1
        self._weights = torch.zeros(self._steps, self._width)
        for part, first in zip(reversed(parts), (self._early, 0), strict=False):
            calls, width = part.weights.shape
            self._weights[first : first + calls, :width] = part.weights
        self._weights = self._weights.to(generator.device)
        shape = generator.bundle.settings.latent_shape
        self._seen = torch.zeros(0, self._width, *shape, device=generator.device)
        self._x = torch.zeros(0, *shape, device=generator.device)
        self._step = np.zeros(0, np.int64)
        self._labels = np.zeros(0, np.int64)
        self._entries = np.zeros(0, np.int64)
        self._streams: dict[int, np.random.Generator] = {}
        self._free: list[int] = []

    @property
    def calls(self) -> int:
        """Network calls from the beginning of a row to its end."""
        return self._steps

    def begin(self, seed: int, numbers: NDArray[np.int64], labels: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Begin some candidates of a seed; numbers and labels are (n,). Returns their rows, (n,)."""
        rows = self._take(len(numbers))
        if not len(rows):
            return rows
        new = streams(seed, numbers)
        self._streams.update(zip(rows.tolist(), new, strict=True))
        self._labels[rows] = -1 if labels is None else labels
        self._entries[rows] = -1
        self._step[rows] = 0
        if self._early:
            self._set_out(rows, self._generator.normal(new))
        else:
            self._enter(rows, self._generator.start(new, labels))
        return rows

    @torch.no_grad()
    def advance(self, rows: NDArray[np.int64]) -> Finished:
        """Take `rows`, (n,) and different, one network call further; those that arrive are taken out."""
        places = torch.from_numpy(rows).to(self._x.device)
        steps = self._step[rows]
        x = self._x[places]
        kept = torch.from_numpy(self._kept[steps]).to(places.device)
        self._seen[places, kept] = self._noise(x, rows)
        weights = self._weights[torch.from_numpy(steps).to(places.device)]
        x = torch.bmm(weights[:, None], self._seen[places].flatten(2)).view_as(x)
        self._x[places] = x
        self._step[rows] += 1
        if self._early and (at_k := steps + 1 == self._early).any():
            self._enter(rows[at_k], self._generator.retrieve(self._streams_of(rows[at_k]), x[torch.from_numpy(at_k)]))
        done = steps + 1 == self._steps
        arrived = rows[done]
        images = np.zeros((0, *self._generator.image_shape), np.uint8)
        if len(arrived):
            images = self._generator.decode(x[torch.from_numpy(done)])
        entries = self._entries[arrived]
        self.drop(arrived)
        return Finished(arrived, images, entries)

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Take rows out that are no longer wanted."""
        for row in rows.tolist():
            del self._streams[row]
        self._free += rows.tolist()

    def left(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Network calls until each row arrives, (n,)."""
        return self._steps - self._step[rows]

    def _noise(self, x: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """The predicted noise of each row: of the denoiser that its step asks for."""
        steps = self._step[rows]
        t = torch.from_numpy(self._timesteps[steps]).to(x.device)
        labels = self._labels[rows] if self._generator.classes else None
        public = self._public[steps]
        if public.all() or not public.any():
            return self._generator.noise(x, t, labels, public=bool(public.all()))
        noise = torch.empty_like(x)
        for kind in (True, False):
            part = np.flatnonzero(public == kind)
            places = torch.from_numpy(part).to(x.device)
            own = None if labels is None else labels[part]
            noise[places] = self._generator.noise(x[places], t[places], own, public=kind)
        return noise

    def _enter(self, rows: NDArray[np.int64], start: Start) -> None:
        """Begin the late steps of rows."""
        if start.retrieved is not None:
            self._entries[rows] = start.retrieved.indices
        self._set_out(rows, start.x)

    def _set_out(self, rows: NDArray[np.int64], x: Tensor) -> None:
        """Give rows the first state of a part of the way."""
        places = torch.from_numpy(rows).to(self._x.device)
        # zeros, for what is not yet seen has no weight, and no NaN of an earlier row may count
        self._seen[places] = 0
        self._seen[places, 0] = x
        self._x[places] = x

    def _streams_of(self, rows: NDArray[np.int64]) -> list[np.random.Generator]:
        return [self._streams[row] for row in rows.tolist()]

    def _take(self, count: int) -> NDArray[np.int64]:
        """Free rows; there are twice as many when they are used up."""
        if len(self._free) < count:
            have = len(self._step)
            more = max(count, have, 32)
            grown = [torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in (self._seen, self._x)]
            self._seen, self._x = grown
            empty = np.zeros(more, np.int64)
            self._step, self._labels, self._entries = (
                np.concatenate([table, empty]) for table in (self._step, self._labels, self._entries)
            )
            self._free += range(have, have + more)
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int64)
