"""Many images on their way from noise, each at its own step: what a batch is made of can change at every step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rapid.diffusion.solvers import Solver
from rapid.methods.rapid.generator import Generator, Route, Start, streams


class _Call(NamedTuple):
    """One network call of a route."""

    timestep: int
    public: bool
    """Whether the public denoiser is asked."""
    kept: int
    """Where its noise is kept, behind the first state of its part of the route."""
    ends: Literal["early", "late"] | None
    """The part that ends with it."""


class Arrived(NamedTuple):
    """Rows that have taken all their steps."""

    rows: NDArray[np.int64]
    """Which, (n,); they are free again."""
    latents: Tensor
    """Float (n, c, h, w)."""
    entries: NDArray[np.int64]
    """The knowledge base's entry from which each began, (n,); -1 if it began with noise."""


class Trajectories:
    """The states of images of one generator, in rows.

    A row is its place in the tables of the solvers, what the solver has seen so far, a label and a noise stream; rows
    may take different numbers of steps. `advance` takes any of them one network call further, all in one batch (two,
    where some are still in the early steps), and those that reach step k are searched for together. What a row becomes
    does not depend on the others, but for rounding in the network: the same as `Generator.generate`.

    Attributes:
        retrieval_seconds: spent in searches so far.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.retrieval_seconds = 0.0
        # one line for each call of each route, one route behind the other
        self._calls: list[_Call] = []
        self._first: dict[Route, int] = {}
        self._weights = torch.zeros(0, 0, device=generator.device)
        shape = generator.bundle.settings.latent_shape
        self._seen = torch.zeros(0, 0, *shape, device=generator.device)
        self._x = torch.zeros(0, *shape, device=generator.device)
        self._step = np.zeros(0, np.int64)
        self._labels = np.zeros(0, np.int64)
        self._entries = np.zeros(0, np.int64)
        self._streams: dict[int, np.random.Generator] = {}
        self._free: list[int] = []

    def begin(
        self,
        seeds: int | NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        steps: int | None = None,
    ) -> NDArray[np.int64]:
        """Begin some candidates of a seed, or of one each, (n,); numbers and labels are (n,). Returns their rows."""
        route = self._generator.route(steps)
        self._learn(route)
        rows = self._take(len(numbers))
        if not len(rows):
            return rows
        new = streams(seeds, numbers)
        self._streams.update(zip(rows.tolist(), new, strict=True))
        self._labels[rows] = -1 if labels is None else labels
        self._entries[rows] = -1
        self._step[rows] = self._first[route]
        if route.early is not None:
            self._set_out(rows, self._generator.normal(new))
        else:
            self._enter(rows, self._generator.start(new, labels, route))
        return rows

    @torch.no_grad()
    def advance(self, rows: NDArray[np.int64]) -> Arrived:
        """Take `rows`, (n,) and different, one network call further; those that arrive are taken out."""
        places = torch.from_numpy(rows).to(self._x.device)
        steps = self._step[rows]
        calls = [self._calls[step] for step in steps.tolist()]
        x = self._x[places]
        kept = torch.tensor([call.kept for call in calls], device=places.device)
        self._seen[places, kept] = self._noise(x, calls, self._labels[rows])
        # behind it all weights are 0: a route of many steps must not make those of few slower
        width = max((call.kept for call in calls), default=0) + 1
        weights = self._weights[torch.from_numpy(steps).to(places.device), :width]
        x = torch.bmm(weights[:, None], self._seen[places, :width].flatten(2)).view_as(x)
        self._x[places] = x
        self._step[rows] += 1
        at_k = np.array([call.ends == "early" for call in calls])
        if at_k.any():
            begin = time.perf_counter()
            self._enter(rows[at_k], self._generator.retrieve(self._streams_of(rows[at_k]), x[torch.from_numpy(at_k)]))
            self.retrieval_seconds += time.perf_counter() - begin
        done = np.array([call.ends == "late" for call in calls])
        entries = self._entries[rows[done]]
        self.drop(rows[done])
        return Arrived(rows[done], x[torch.from_numpy(done)], entries)

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Take rows out that are no longer wanted."""
        for row in rows.tolist():
            del self._streams[row]
        self._free += rows.tolist()

    def _learn(self, route: Route) -> None:
        """Put the calls of a route behind those that are known."""
        if route in self._first:
            return
        self._first[route] = len(self._calls)
        tables = [self._weights]
        parts: list[tuple[Literal["early", "late"], Solver]] = [("late", route.late)]
        if route.early is not None:
            parts.insert(0, ("early", route.early))
        for name, part in parts:
            for place, t in enumerate(part.timesteps, 1):
                public = name == "early" or t > self._generator.trained
                self._calls.append(_Call(t, public, place, name if place == len(part.timesteps) else None))
            tables.append(part.weights.to(self._weights.device))
        width = max(table.shape[1] for table in tables)
        self._weights = torch.cat([F.pad(table, (0, width - table.shape[1])) for table in tables])
        if width > self._seen.shape[1]:
            more = self._seen.new_zeros(len(self._seen), width - self._seen.shape[1], *self._seen.shape[2:])
            self._seen = torch.cat([self._seen, more], 1)

    def _noise(self, x: Tensor, calls: Sequence[_Call], labels: NDArray[np.int64]) -> Tensor:
        """The predicted noise of each row: of the denoiser that its call asks for."""
        t = torch.tensor([call.timestep for call in calls], device=x.device)
        own = labels if self._generator.classes else None
        public = np.array([call.public for call in calls])
        if public.all() or not public.any():
            return self._generator.noise(x, t, own, public=bool(public.all()))
        noise = torch.empty_like(x)
        for kind in (True, False):
            part = np.flatnonzero(public == kind)
            places = torch.from_numpy(part).to(x.device)
            noise[places] = self._generator.noise(x[places], t[places], None if own is None else own[part], public=kind)
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
