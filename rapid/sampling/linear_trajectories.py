"""Trajectories of linear samplers: candidates at different calls of different samplers share one batch.

Each state that a linear sampler visits is a fixed combination of what the row has seen (see
`rapid.diffusion.call_table`). So a row needs no sampler object: it is a line in a table of calls, its parts, a label
and a noise stream.

On a device, tables and parts are there, and the host knows beforehand which rows need noise, change the network or
finish. So a step sends the numbers of its rows and waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rapid.diffusion.call_table import KEPT, OUTPUT, CallTable, X, combine
from rapid.precision import exact_float32
from rapid.recording import Capture, Recorder, padded_rows, records
from rapid.sampling.generator import Finished
from rapid.sampling.streams import Streams, make_streams, normal

MIN_ROWS = 32


class LinearSampler(Protocol):
    """A sampler that is a table of calls, such as `Solver` and `Path` of `rapid.diffusion`."""

    @property
    def table(self) -> CallTable:
        """All calls."""
        ...


class Phase(NamedTuple):
    """Part of a route: one sampler, with the network of each of its calls."""

    sampler: LinearSampler
    networks: tuple[str, ...]
    """Names of the networks, one for each call; see `LinearModel.predict`."""


Route = tuple[Phase, ...]
"""All network calls of an image. Routes are equal if they share their samplers."""


class Entry(NamedTuple):
    """First states of a phase, for n rows."""

    x: Tensor
    """States, float (n, *latent_shape)."""
    records: NDArray[np.int64] | None = None
    """Knowledge base records that the rows start from, int64 (n,); None leaves them as they are."""


class LinearModel(Protocol):
    """What a method supplies; its formulas are here, the bookkeeping of rows is in `LinearTrajectories`."""

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
            x: last states of the phase before, float (n, *latent_shape); None at phase 0, whose states are then
                multiplied by `CallTable.first_level`.
        """
        ...

    def predict(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """The output of a network for states x, float (n, *latent_shape): the noise in them, or the denoised image.

        It is recorded on a GPU: see `rapid.recording.Recorder`.

        Args:
            network: its name, as in `Phase.networks`.
            x: states, float (n, *latent_shape), on the device like all tensors here.
            t: their timesteps, int64 (n,), or noise levels, float (n,): entries of `CallTable.times`.
            labels: their classes, int64 (n,); None without classes.
        """
        ...


class LinearTrajectories:
    """Rows of one model; implements `rapid.sampling.generator.Trajectories`.

    `advance` makes one batch per network. Rows that reach the end of a phase enter the next one together. Samplers that
    take fresh noise between their calls take it from the row's own stream.

    Args:
        model: what a method supplies.
        capture: how network calls are recorded, for tests; see `Recorder`.

    Attributes:
        search_seconds: time spent in `LinearModel.enter` after phase 0, which is where a method searches.
    """

    def __init__(self, model: LinearModel, capture: Capture | None = None) -> None:
        self._model = model
        self._capture = capture
        self.search_seconds = 0.0
        self._recorders: dict[str, Recorder] = {}
        # one line for each call of each known route: on the host what decides, on the device what computes
        self._first: dict[Route, int] = {}
        self._networks: list[str] = []
        self._slot, self._network, self._following = (np.zeros(0, np.int64) for _ in range(3))
        self._noisy, self._finishes = np.zeros(0, bool), np.zeros(0, bool)
        self._times = torch.zeros(0, device=model.device)
        self._slots = torch.zeros(0, dtype=torch.int64, device=model.device)
        self._weights = torch.zeros(0, 2, OUTPUT, device=model.device)
        # one line for each row
        self._parts = torch.zeros(0, OUTPUT, *model.latent_shape, device=model.device)
        self._classes = torch.zeros(0, dtype=torch.int64, device=model.device)
        self._call, self._labels, self._records = (np.zeros(0, np.int64) for _ in range(3))
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
        route = self._model.route(steps)
        first = self._learn(route)
        rows = self._take(len(numbers))
        if not len(rows):
            return rows
        streams = make_streams(seeds, numbers)
        self._streams.update(zip(rows.tolist(), streams, strict=True))
        self._labelled = labels is not None
        if labels is not None:
            self._labels[rows] = labels
            self._classes[self._sent(rows)] = self._sent(labels)
        self._records[rows] = -1
        self._call[rows] = first
        entry, level = self._model.enter(0, streams, labels, None), route[0].sampler.table.first_level
        self._set(rows, entry if level == 1 else entry._replace(x=level * entry.x))
        return rows

    @torch.no_grad()
    @exact_float32()
    def advance(self, rows: NDArray[np.int64]) -> Finished:
        """Advance distinct rows by one network call each; see the protocol."""
        at = self._call[rows]
        places, calls = self._sent(np.stack([rows, at])).unbind()
        self._parts[places, self._slots[calls]] = self._predict(at, places, calls)
        self._add_noise(rows, at)
        # weights of later parts are 0: rows with few calls need not pay for others with many
        width = int((self._slot[at] + self._noisy[at]).max()) + 1
        after = combine(self._weights[calls, :, :width], self._parts[places, :width])
        self._parts[places, : KEPT + 1] = after
        self._call[rows] += 1
        self._enter_next(rows, at, after[:, X])
        done = np.flatnonzero(self._finishes[at])
        finished = Finished(rows[done], after[self._sent(done), X], self._records[rows[done]])
        self.drop(finished.rows)
        return finished

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Abandon rows; see the protocol."""
        for row in rows.tolist():
            del self._streams[row]
        self._free += rows.tolist()

    def _sent(self, values: NDArray[Any]) -> Tensor:
        """Copy to the device what the host knows, without waiting for it."""
        return torch.from_numpy(values).to(self._parts.device, non_blocking=True)

    def _learn(self, route: Route) -> int:
        """Append the calls of a route to the tables, if it is new; return the index of its first call."""
        if route in self._first:
            return self._first[route]
        first = self._first[route] = len(self._slot)
        for phase, (sampler, networks) in enumerate(route):
            final, last = phase == len(route) - 1, np.arange(len(networks)) == len(networks) - 1
            self._networks += sorted(set(networks) - set(self._networks))
            numbers = [self._networks.index(name) for name in networks]
            self._network = np.concatenate([self._network, np.array(numbers, np.int64)])
            self._following = np.concatenate([self._following, np.where(last & (not final), phase + 1, 0)])
            self._finishes = np.concatenate([self._finishes, last & final])
            self._append(sampler.table)
        return first

    def _append(self, table: CallTable) -> None:
        """Append calls to the tables of arithmetic; parts become as many as the widest table has."""
        times, weights = (part.to(self._parts.device, non_blocking=True) for part in (table.times, table.weights))
        self._slot = np.concatenate([self._slot, np.array(table.slots, np.int64)])
        self._noisy = np.concatenate([self._noisy, np.array(table.noisy, bool)])
        self._slots = self._sent(self._slot)
        self._times = torch.cat([self._times.to(times.dtype), times])
        width = max(self._weights.shape[2], weights.shape[2])
        self._weights = torch.cat([F.pad(some, (0, width - some.shape[2])) for some in (self._weights, weights)])
        if width > self._parts.shape[1]:
            shape = (len(self._parts), width - self._parts.shape[1], *self._parts.shape[2:])
            self._parts = torch.cat([self._parts, self._parts.new_zeros(shape)], 1)

    def _predict(self, at: NDArray[np.int64], places: Tensor, calls: Tensor) -> Tensor:
        """The output of each row's call, by its network."""
        x, t = self._parts[places, X], self._times[calls]
        labels = self._classes[places] if self._labelled else None
        numbers = self._network[at]
        used = np.unique(numbers).tolist()
        if len(used) == 1:
            return self._output(self._networks[used[0]], x, t, labels)
        output = torch.empty_like(x)
        for number in used:
            part = self._sent(np.flatnonzero(numbers == number))
            own = None if labels is None else labels[part]
            output[part] = self._output(self._networks[number], x[part], t[part], own)
        return output

    def _output(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """What the model predicts for rows; recorded on a GPU, for a few numbers of rows."""
        if self._capture is None and not records(x.device):
            return self._model.predict(network, x, t, labels)
        if network not in self._recorders:
            model = self._model

            # it keeps the model alive, not this object and its recordings
            def predict(x: Tensor, t: Tensor, labels: Tensor | None = None) -> Sequence[Tensor]:
                return [model.predict(network, x, t, labels)]

            self._recorders[network] = Recorder(predict, x.device, self._capture)
        count = len(x)
        rows = torch.arange(padded_rows(count), device=x.device).clamp_max_(count - 1)
        arguments = [part[rows] for part in (x, t, labels) if part is not None]
        return self._recorders[network](*arguments)[0][:count]

    def _add_noise(self, rows: NDArray[np.int64], at: NDArray[np.int64]) -> None:
        """Draw fresh noise for the rows whose calls need it."""
        needed = self._noisy[at]
        if needed.any():
            streams = [self._streams[row] for row in rows[needed].tolist()]
            places, parts = self._sent(np.stack([rows[needed], self._slot[at[needed]] + 1])).unbind()
            self._parts[places, parts] = self._sent(normal(streams, self._model.latent_shape))

    def _enter_next(self, rows: NDArray[np.int64], at: NDArray[np.int64], x: Tensor) -> None:
        """Move rows whose phase has ended into the next one."""
        following = self._following[at]
        for phase in np.unique(following[following > 0]).tolist():
            part = np.flatnonzero(following == phase)
            own = rows[part]
            streams, labels = [self._streams[row] for row in own.tolist()], self._labels[own]
            start = time.perf_counter()
            entry = self._model.enter(phase, streams, labels if self._labelled else None, x[self._sent(part)])
            self.search_seconds += time.perf_counter() - start
            self._set(own, entry)

    def _set(self, rows: NDArray[np.int64], entry: Entry) -> None:
        """Put rows at the first state of a phase."""
        if entry.records is not None:
            self._records[rows] = entry.records
        places = self._sent(rows)
        # unused parts have weight 0, but 0 times a NaN left by an earlier row would be NaN
        self._parts.index_fill_(0, places, 0)
        self._parts[places, : KEPT + 1] = entry.x[:, None]

    def _take(self, count: int) -> NDArray[np.int64]:
        """Take free rows; the tables at least double when there are too few."""
        if len(self._free) < count:
            size = len(self._call)
            more = max(count, size, MIN_ROWS)
            self._parts, self._classes = (
                torch.cat([table, table.new_zeros(more, *table.shape[1:])]) for table in (self._parts, self._classes)
            )
            empty = np.zeros(more, np.int64)
            self._call, self._labels, self._records = (
                np.concatenate([table, empty]) for table in (self._call, self._labels, self._records)
            )
            self._free += range(size, size + more)
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int64)
