"""The worker of one model: the requests that it serves, and the rows that make their images."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from rapid.sampling.acceptance import AcceptanceRate
from rapid.sampling.generate import generate, make_request
from rapid_server.scheduler import Costs, Load, Turns, largest_peer, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from rapid.sampling.generator import Generator
    from rapid.sampling.request import Request

_LOG = logging.getLogger(__name__)

LONGEST_STEP = 0.1
"""Seconds. A new request waits for the running step. If one row takes nearly as long, twice the time of one row: on a
machine that is busy at start-up, most of a step is waiting, however many rows it has."""
MEASUREMENTS = 5
"""Steps per measured size; the shortest one counts, as other processes may have delayed the rest."""
MEASURE_SECONDS = 1.0
"""No further measurement of a size once its steps have taken so long."""
MAX_MEASURED = 1024
"""Largest measured size."""
DECODER_ROWS = 32
"""Latents wait until there are so many, because the decoder is less efficient with fewer,"""
DECODER_WAIT = 2
"""but for this many steps at most, and not if few rows are in flight."""


class ImageDone(NamedTuple):
    """A finished image of a request."""

    place: int
    image: NDArray[np.uint8]
    """(H, W) or (H, W, 3)."""
    record: int
    """Knowledge base record that it started from; -1 if it started from noise."""


class Step(NamedTuple):
    """What happened in a step."""

    rows: int
    seconds: float
    search_seconds: float
    images: list[tuple[Request, list[ImageDone]]]


class _Latent(NamedTuple):
    """A finished row that waits for the decoder."""

    number: int
    latent: Tensor
    step: int


class _Progress:
    """State of a request in the worker."""

    def __init__(self, step: int) -> None:
        self.served = self.decoded = step
        """Steps in which it last had rows, and last had latents decoded."""
        self.rows: dict[int, int] = {}
        """Candidate number by row, oldest first."""
        self.latents: deque[_Latent] = deque()
        self.records: dict[int, int] = {}


class _Portion(NamedTuple):
    """A request's part of a step."""

    request: Request
    progress: _Progress
    rows: int
    """Candidates that make a network call."""
    latents: int
    """Maximum number of latents to decode."""


class Worker:
    """Makes the images of many requests with one model, all rows of a step in one batch. Not thread-safe.

    A step advances some rows by one network call (see `scheduler.share`) and decodes some of the finished latents. A
    large request beside small ones gets no more of the decoder than of the rows. New candidates join at any step and
    leave when they are finished.

    Args:
        generator: the model.
        batch: maximum rows of a step; None takes what `measure` finds.

    Attributes:
        generator: as given.
        batch: maximum rows of a step.
    """

    def __init__(self, generator: Generator, batch: int | None = None) -> None:
        self.generator = generator
        self.batch = batch or 1
        self._fixed = batch is not None
        self._costs = Costs([1], [1.0])
        self._calls = generator.calls()
        self._rate = AcceptanceRate()
        self._device = torch.device("cpu")
        self.clear()

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._requests)

    @property
    def requests(self) -> set[Request]:
        """The current requests."""
        return set(self._requests)

    def make_request(
        self, count: int, labels: Sequence[int] | None = None, seed: int | None = None, steps: int | None = None
    ) -> Request:
        """Make a request for this model; see `rapid.sampling.generate.make_request` for arguments and errors."""
        return make_request(self.generator, count, labels, seed, steps, self._rate)

    def clear(self) -> None:
        """Forget all requests and rows."""
        self._trajectories = self.generator.trajectories()
        self._requests: dict[Request, _Progress] = {}
        self._turns = Turns()
        self._steps = 0

    def measure(self) -> None:
        """Make one image, then measure the duration of steps by their size; the worker must not have requests yet."""
        generate(self.generator, 1, seed=0)
        most = self.batch if self._fixed else MAX_MEASURED
        sizes: list[int] = []
        seconds: list[float] = []
        for size in [2**power for power in range(most.bit_length())]:
            sizes.append(size)
            seconds.append(self._measure_step(size))
            longest = max(LONGEST_STEP, 2 * seconds[0])
            if seconds[-1] > longest:
                break
        self._costs = Costs(sizes, seconds)
        if not self._fixed:
            self.batch = self._costs.best_batch(longest)
        milliseconds = ", ".join(f"{size}: {1e3 * one:.0f}" for size, one in zip(sizes, seconds, strict=True))
        _LOG.info("batch %d; milliseconds per step by rows: %s", self.batch, milliseconds)

    def _measure_step(self, size: int) -> float:
        """Seconds of a step with `size` rows, of which, on average, size / calls begin and as many are decoded."""
        labels = np.zeros(size, np.int64) if self.generator.classes else None
        rows = np.zeros(0, np.int64)
        latents = torch.zeros(-(-size // self._calls), *self.generator.latent_shape)
        beginning: list[float] = []
        calling: list[float] = []
        decoding: list[float] = []
        while len(calling) < MEASUREMENTS and sum(calling) <= MEASURE_SECONDS:
            start = time.perf_counter()
            if not len(rows):
                rows = self._trajectories.begin(0, np.arange(size), labels)
                beginning.append(time.perf_counter() - start)
                start = time.perf_counter()
            finished = self._trajectories.advance(rows)
            # a GPU computes in the background: reading the result waits for it
            finished.latents.sum().item()
            self._device = finished.latents.device
            middle = time.perf_counter()
            self.generator.label(self.generator.decode(latents))
            decoding.append(time.perf_counter() - middle)
            calling.append(middle - start)
            rows = np.setdiff1d(rows, finished.rows)
        self._trajectories.drop(rows)
        return min(calling) + (min(beginning) + min(decoding) * size / len(latents)) / self._calls

    def device_answers(self) -> bool:
        """Whether the model's device still computes."""
        try:
            return float(torch.ones(1, device=self._device).sum()) == 1
        except RuntimeError:
            return False

    def add(self, request: Request) -> None:
        """Serve a request, if the worker does not have it yet."""
        if request not in self._requests:
            self._requests[request] = _Progress(self._steps)

    def remove(self, request: Request) -> None:
        """Forget a request, if the worker has it; its rows are free at once."""
        progress = self._requests.pop(request, None)
        if progress is not None:
            self._trajectories.drop(np.fromiter(progress.rows, np.int64))

    def step(self) -> Step:
        """Take one step. Requests that it completes are removed."""
        start, searched = time.perf_counter(), self._trajectories.search_seconds
        portions = self._portions()
        rows = self._advance(portions)
        images = self._decode(portions)
        for request, done in images:
            if not request.missing:
                self.remove(request)
            elif done:
                self._drop_unneeded(request)
        return Step(rows, time.perf_counter() - start, self._trajectories.search_seconds - searched, images)

    def _drop_unneeded(self, request: Request) -> None:
        """Drop the candidates of classes that have no open place any more."""
        progress = self._requests[request]
        rows = [row for row, number in progress.rows.items() if not request.needs(number)]
        for row in rows:
            request.abandon(progress.rows.pop(row))
        self._trajectories.drop(np.array(rows, np.int64))

    def _portions(self) -> list[_Portion]:
        """The part of each request in this step, in the order in which they get the decoder."""
        requests = list(self._requests.items())
        loads, full = [], []
        for request, progress in requests:
            # no new network calls for a request whose latents pile up before the decoder
            full.append(len(progress.latents) >= 2 * self.batch)
            rows = 0 if full[-1] else len(progress.rows) + request.wants
            loads.append(Load(request.missing, rows or len(progress.latents), progress.served))
        self._steps += 1
        shared = share(loads, self.batch, self._costs)
        granted_all = self._turns.correct(loads, shared, self.batch, self._costs)
        turn, bound = granted_all != shared, largest_peer(loads)
        portions = []
        for (request, progress), load, blocked, granted in zip(requests, loads, full, granted_all, strict=True):
            if granted:
                progress.served = self._steps
            latents = self._latents(self.batch if granted and (turn or load.missing <= bound) else granted)
            portions.append(_Portion(request, progress, 0 if blocked else granted, latents))
        # the smallest requests first, but in a turn those whose latents have waited longest
        return sorted(portions, key=lambda one: one.progress.decoded if turn else one.request.missing)

    def _latents(self, rows: int) -> int:
        """Latents to decode per step with so many rows: twice the average, because rows finish in groups."""
        return -(-2 * rows // self._calls)

    def _advance(self, portions: Sequence[_Portion]) -> int:
        """Advance the granted rows by one network call; return their number."""
        new: dict[int | None, list[_Portion]] = {}
        for portion in portions:
            if portion.rows > len(portion.progress.rows):
                new.setdefault(portion.request.steps, []).append(portion)
        for steps, together in new.items():
            self._begin(together, steps)
        rows = np.array([row for one in portions for row in islice(one.progress.rows, one.rows)], np.int64)
        if not len(rows):
            return 0
        finished = self._trajectories.advance(rows)
        owners = {row: portion.progress for portion in portions for row in portion.progress.rows}
        for row, latent, record in zip(
            finished.rows.tolist(), finished.latents, finished.records.tolist(), strict=True
        ):
            progress = owners[row]
            number = progress.rows.pop(row)
            progress.latents.append(_Latent(number, latent, self._steps))
            progress.records[number] = record
        return len(rows)

    def _begin(self, portions: Sequence[_Portion], steps: int | None) -> None:
        """Draw the granted candidates that are not in flight yet, of requests with equal steps, all at once."""
        drawn = [one.request.draw(one.rows - len(one.progress.rows)) for one in portions]
        numbers = np.concatenate([some for some, _ in drawn])
        seeds = np.repeat(np.array([one.request.seed for one in portions]), [len(some) for some, _ in drawn])
        classes = [labels for _, labels in drawn if labels is not None]
        rows = self._trajectories.begin(seeds, numbers, np.concatenate(classes) if classes else None, steps).tolist()
        for one, (some, _) in zip(portions, drawn, strict=True):
            own, rows = rows[: len(some)], rows[len(some) :]
            one.progress.rows |= dict(zip(own, some.tolist(), strict=True))

    def _decode(self, portions: Sequence[_Portion]) -> list[tuple[Request, list[ImageDone]]]:
        """Decode some of the waiting latents, and offer the images to their requests."""
        waiting = [portion for portion in portions if portion.progress.latents and portion.latents]
        in_flight = sum(len(portion.progress.rows) for portion in portions)
        if sum(len(one.progress.latents) for one in waiting) < min(DECODER_ROWS, in_flight // 4) and all(
            self._steps - one.progress.latents[0].step < DECODER_WAIT for one in waiting
        ):
            return []
        left = self._latents(self.batch)
        batch: list[tuple[Request, _Progress, list[_Latent]]] = []
        for request, progress, _, latents in waiting:
            taken = [progress.latents.popleft() for _ in range(min(left, latents, len(progress.latents)))]
            left -= len(taken)
            if taken:
                progress.decoded = self._steps
                batch.append((request, progress, taken))
        if not batch:
            return []
        images = self.generator.decode(torch.stack([one.latent for _, _, taken in batch for one in taken]))
        probabilities = self.generator.label(images)
        done, first = [], 0
        for request, progress, taken in batch:
            part = slice(first, first + len(taken))
            numbers = np.array([one.number for one in taken])
            accepted = request.offer(numbers, images[part], None if probabilities is None else probabilities[part])
            done.append(
                (request, [ImageDone(one.place, one.image, progress.records[one.candidate]) for one in accepted])
            )
            first = part.stop
        return done
