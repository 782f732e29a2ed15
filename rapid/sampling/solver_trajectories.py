"""Trajectories of linear solvers: candidates at different steps of different solvers share one batch.

Each state that a linear solver visits is a fixed combination of the first state and the noises predicted so far (see
`rapid.diffusion.solvers.Solver`). So a row needs no solver object: it is a line in a table of weights, what it has seen
so far, a label and a noise stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rapid.diffusion.solvers import Solver
from rapid.precision import exact_float32
from rapid.sampling.generator import Finished
from rapid.sampling.streams import Streams, make_streams

MIN_ROWS = 32


class Phase(NamedTuple):
    """Part of a route: one solver, with the network that predicts the noise of each call."""

    solver: Solver
    networks: tuple[str, ...]
    """Names of the networks, one for each of `solver.timesteps`; see `SolverModel.predict`."""


Route = tuple[Phase, ...]
"""All network calls of an image. Routes are equal if they share their solvers."""


class Entry(NamedTuple):
    """First states of a phase, for n rows."""

    x: Tensor
    """States, float (n, *latent_shape)."""
    records: NDArray[np.int64] | None = None
    """Knowledge base records that the rows start from, int64 (n,); None leaves them as they are."""


class SolverModel(Protocol):
    """What a method supplies; its formulas are here, the bookkeeping of rows is in `SolverTrajectories`."""

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of a state."""
        ...

    def route(self, steps: int | None = None) -> Route:
        """The route of an image with so many steps, equal for equal steps; None takes the default."""
        ...

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        """First states of a phase.

        Args:
            phase: its index in the route.
            streams: noise streams of n rows; new ones at phase 0.
            labels: their classes, int64 (n,); None without classes.
            x: last states of the phase before, float (n, *latent_shape); None at phase 0.
        """
        ...

    def predict(self, network: str, x: Tensor, t: Tensor, labels: NDArray[np.int64] | None) -> Tensor:
        """The noise that a network predicts in x_t, float (n, *latent_shape).

        Args:
            network: its name, as in `Phase.networks`.
            x: states, float (n, *latent_shape).
            t: their timesteps, int64 (n,).
            labels: their classes, int64 (n,); None without classes.
        """
        ...


class _Call(NamedTuple):
    """One network call of a route."""

    timestep: int
    network: str
    slot: int
    """Where the predicted noise is stored: slot 0 holds the first state of the phase."""
    next_phase: int | None
    """The phase that begins after this call; None within a phase and at the end of the route."""
    finishes: bool


class SolverTrajectories:
    """Rows of one model; implements `rapid.sampling.generator.Trajectories`.

    `advance` makes one batch per network. Rows that reach the end of a phase enter the next one together.

    Attributes:
        search_seconds: time spent in `SolverModel.enter` after phase 0, which is where a method searches.
    """

    def __init__(self, model: SolverModel) -> None:
        self._model = model
        self.search_seconds = 0.0
        # one entry and one line of weights for each call of each known route
        self._calls: list[_Call] = []
        self._first: dict[Route, int] = {}
        device, shape = model.device, model.latent_shape
        self._weights = torch.zeros(0, 0, device=device)
        self._seen = torch.zeros(0, 0, *shape, device=device)
        self._x = torch.zeros(0, *shape, device=device)
        self._step = np.zeros(0, np.int64)
        self._labels = np.zeros(0, np.int64)
        self._records = np.zeros(0, np.int64)
        self._labelled = False
        self._streams: dict[int, np.random.Generator] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Number of rows in flight."""
        return len(self._streams)

    @torch.no_grad()
    @exact_float32()
    def begin(
        self,
        seeds: int | NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        steps: int | None = None,
    ) -> NDArray[np.int64]:
        """Start candidates; see the protocol."""
        first = self._learn(self._model.route(steps))
        rows = self._take(len(numbers))
        if not len(rows):
            return rows
        streams = make_streams(seeds, numbers)
        self._streams.update(zip(rows.tolist(), streams, strict=True))
        self._labelled = labels is not None
        self._labels[rows] = -1 if labels is None else labels
        self._records[rows] = -1
        self._step[rows] = first
        self._set(rows, self._model.enter(0, streams, labels, None))
        return rows

    @torch.no_grad()
    @exact_float32()
    def advance(self, rows: NDArray[np.int64]) -> Finished:
        """Advance distinct rows by one network call each; see the protocol."""
        places = torch.from_numpy(rows).to(self._x.device)
        steps = self._step[rows]
        calls = [self._calls[step] for step in steps.tolist()]
        slots = torch.tensor([call.slot for call in calls], device=places.device)
        self._seen[places, slots] = self._predict(self._x[places], calls, self._labels_of(rows))
        # weights beyond the slot are 0: rows with few steps need not pay for others with many
        width = max((call.slot for call in calls), default=0) + 1
        weights = self._weights[torch.from_numpy(steps).to(places.device), :width]
        x = torch.bmm(weights[:, None], self._seen[places, :width].flatten(2)).view(len(rows), *self._x.shape[1:])
        self._x[places] = x
        self._step[rows] += 1
        self._enter_next(rows, calls, x)
        done = np.array([call.finishes for call in calls], bool)
        records = self._records[rows[done]]
        self.drop(rows[done])
        return Finished(rows[done], x[torch.from_numpy(done)], records)

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Abandon rows; see the protocol."""
        for row in rows.tolist():
            del self._streams[row]
        self._free += rows.tolist()

    def _learn(self, route: Route) -> int:
        """Append the calls of a route to the tables, if it is new; return the index of its first call."""
        if route in self._first:
            return self._first[route]
        first = self._first[route] = len(self._calls)
        tables = [self._weights]
        for phase, (solver, networks) in enumerate(route):
            final = phase == len(route) - 1
            for slot, (t, network) in enumerate(zip(solver.timesteps, networks, strict=True), 1):
                last = slot == len(solver.timesteps)
                following = phase + 1 if last and not final else None
                self._calls.append(_Call(t, network, slot, following, last and final))
            tables.append(solver.weights.to(self._weights.device))
        width = max(table.shape[1] for table in tables)
        self._weights = torch.cat([F.pad(table, (0, width - table.shape[1])) for table in tables])
        if width > self._seen.shape[1]:
            more = self._seen.new_zeros(len(self._seen), width - self._seen.shape[1], *self._seen.shape[2:])
            self._seen = torch.cat([self._seen, more], 1)
        return first

    def _predict(self, x: Tensor, calls: Sequence[_Call], labels: NDArray[np.int64] | None) -> Tensor:
        """The predicted noise of each row, by the network of its call."""
        t = torch.tensor([call.timestep for call in calls], device=x.device)
        networks = sorted({call.network for call in calls})
        if len(networks) == 1:
            return self._model.predict(networks[0], x, t, labels)
        noise = torch.empty_like(x)
        for network in networks:
            part = np.flatnonzero([call.network == network for call in calls])
            places = torch.from_numpy(part).to(x.device)
            own = None if labels is None else labels[part]
            noise[places] = self._model.predict(network, x[places], t[places], own)
        return noise

    def _enter_next(self, rows: NDArray[np.int64], calls: Sequence[_Call], x: Tensor) -> None:
        """Move rows whose phase has ended into the next one."""
        for phase in sorted({call.next_phase for call in calls if call.next_phase is not None}):
            part = np.array([call.next_phase == phase for call in calls])
            streams = [self._streams[row] for row in rows[part].tolist()]
            start = time.perf_counter()
            entry = self._model.enter(phase, streams, self._labels_of(rows[part]), x[torch.from_numpy(part)])
            self.search_seconds += time.perf_counter() - start
            self._set(rows[part], entry)

    def _set(self, rows: NDArray[np.int64], entry: Entry) -> None:
        """Put rows at the first state of a phase."""
        if entry.records is not None:
            self._records[rows] = entry.records
        places = torch.from_numpy(rows).to(self._x.device)
        # unused slots have weight 0, but 0 times a NaN left by an earlier row would be NaN
        self._seen[places] = 0
        self._seen[places, 0] = entry.x
        self._x[places] = entry.x

    def _labels_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._labels[rows] if self._labelled else None

    def _take(self, count: int) -> NDArray[np.int64]:
        """Take free rows; the tables at least double when there are too few."""
        if len(self._free) < count:
            size = len(self._step)
            more = max(count, size, MIN_ROWS)
            self._seen, self._x = (torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in (self._seen, self._x))
            empty = np.zeros(more, np.int64)
            self._step, self._labels, self._records = (
                np.concatenate([table, empty]) for table in (self._step, self._labels, self._records)
            )
            self._free += range(size, size + more)
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int64)
