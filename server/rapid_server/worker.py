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
from rapid_server.device import answers
from rapid_server.scheduler import SMALL, Costs, Load, Turns, largest_peer, share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from rapid.sampling.generator import Generator
    from rapid.sampling.request import Request

_LOG = logging.getLogger(__name__)

LONGEST_STEP = 0.2
"""Seconds. A new request waits for the running step. If one row takes nearly as long, twice the time of one row: on a
machine that is busy at start-up, most of a step is waiting, however many rows it has."""
ENOUGH = 0.8
"""Share of the best throughput with which a step has enough rows: more of them take longer, and save little."""
QUICK_STEP = 0.03
"""Seconds that network calls, and then a group of the decoder, take at most while all requests are large: then a small
one that comes waits no longer than that."""
QUICK_LATENTS = 16
"""Least latents of such a group: with fewer, the decoder is much less efficient."""
MEASUREMENTS = 6
"""Steps per measured size; the shortest one counts, as other processes may have delayed the rest. The sizes take turns,
as what delays one step often delays the next ones, too."""
ROUNDS_SECONDS = 4.0
"""No further round of sizes begins after so long, but for the third."""
DECODER_SECONDS = 1.0
"""No further measurement of the decoder after so long."""
MAX_MEASURED = 1024
"""Largest measured size."""
DECODER_ROWS = 64
"""Latents wait until there are so many, because the decoder is less efficient with fewer,"""
DECODER_WAIT = 3
"""but for this many steps at most, and not if few rows are in flight or a request waits for nothing else."""


class ImageDone(NamedTuple):
    """A finished image of a request."""

    place: int
    image: NDArray[np.uint8]
    """(H, W) or (H, W, 3)."""
    record: int
    """Knowledge base record that it started from; -1 if it started from noise."""
    probabilities: NDArray[np.float32] | None
    """Of the classes, by the probe, (classes,); None without one."""


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

    def __init__(self, step: int, client: str) -> None:
        self.client = client
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
    sparing: bool
    """Whether it draws no candidates that are made only in case others are not accepted."""


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
        self.batch = self._quick_rows = self._enough = batch or 1
        self._quick_latents = QUICK_LATENTS
        self._fixed = batch is not None
        self._costs = Costs([1], [1.0])
        self._calls = generator.calls()
        # a place of a large request accepts more candidates, because more classes are open
        self._rate_small, self._rate_large = AcceptanceRate(), AcceptanceRate()
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
        rate = self._rate_small if count <= SMALL else self._rate_large
        return make_request(self.generator, count, labels, seed, steps, rate)

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
        calls: list[float] = []
        begin, latent = time.perf_counter(), self._measure_decoder()
        for size in [2**power for power in range(most.bit_length())]:
            sizes.append(size)
            calls.append(min(self._measure_step(size) for _ in range(2)))
            if calls[-1] > max(LONGEST_STEP, 2 * calls[0]):
                break
        for number in range(MEASUREMENTS - 2):
            # on a GPU the first call of a size computes, the second records, and only later ones replay
            if number and time.perf_counter() - begin > ROUNDS_SECONDS:
                break
            calls = [min(call, self._measure_step(size)) for size, call in zip(sizes, calls, strict=True)]
        seconds = [call + latent * size / self._calls for size, call in zip(sizes, calls, strict=True)]
        longest = max(LONGEST_STEP, 2 * seconds[0])
        self._costs = Costs(sizes, seconds)
        if not self._fixed:
            self.batch = self._costs.best_batch(longest)
        self._enough = min(self.batch, self._costs.best_batch(longest, ENOUGH))
        # on a machine that is busy at start-up, as above
        quick = max(QUICK_STEP, 2 * calls[0])
        self._quick_rows = min(self.batch, max(size for size, call in zip(sizes, calls, strict=True) if call <= quick))
        self._quick_latents = max(QUICK_LATENTS, int(quick / latent))
        milliseconds = ", ".join(f"{size}: {1e3 * one:.0f}" for size, one in zip(sizes, seconds, strict=True))
        _LOG.info("batch %d; milliseconds per step by rows: %s", self.batch, milliseconds)

    def _measure_step(self, size: int) -> float:
        """Seconds of a network call with `size` rows, of which, on average, size / calls begin."""
        labels = np.zeros(size, np.int64) if self.generator.classes else None
        start = time.perf_counter()
        rows = self._trajectories.begin(0, np.arange(size), labels)
        beginning, start = time.perf_counter() - start, time.perf_counter()
        finished = self._trajectories.advance(rows)
        # a GPU computes in the background: reading the result waits for it
        finished.latents.sum().item()
        calling = time.perf_counter() - start
        self._device = finished.latents.device
        self._trajectories.drop(np.setdiff1d(rows, finished.rows))
        return calling + beginning / self._calls

    def _measure_decoder(self) -> float:
        """Seconds of decoder and probe for a latent, of as many as are decoded together; of fewer if it is slow."""
        count = min(DECODER_ROWS, 1 + int(DECODER_SECONDS / self._decoding(1)))
        return self._decoding(count) / count

    def _decoding(self, count: int) -> float:
        """Seconds to decode and label so many latents."""
        latents = torch.zeros(count, *self.generator.latent_shape)
        found: list[float] = []
        while len(found) < MEASUREMENTS and sum(found) <= DECODER_SECONDS:
            start = time.perf_counter()
            self.generator.finish(latents)
            found.append(time.perf_counter() - start)
        return min(found)

    def device_answers(self) -> bool:
        """Whether the model's device still computes."""
        return answers(self._device)

    def add(self, request: Request, client: str = "") -> None:
        """Serve a request of a client, if the worker does not have it yet."""
        if request not in self._requests:
            self._requests[request] = _Progress(self._steps, client)

    def remove(self, request: Request) -> None:
        """Forget a request, if the worker has it; its rows are free at once."""
        progress = self._requests.pop(request, None)
        if progress is not None:
            self._trajectories.drop(np.fromiter(progress.rows, np.int64))

    def step(self, arrived: Callable[[], bool] = lambda: False) -> Step:
        """Take one step. Requests that it completes are removed.

        Args:
            arrived: whether a request has come that the worker does not have yet. If all others are large, the decoder
                stops for it after a group of latents.
        """
        start, searched = time.perf_counter(), self._trajectories.search_seconds
        quick = self._all_large
        portions = self._portions(self._quick_rows if quick else self.batch)
        rows = self._advance(portions)
        images = self._decode(portions, self._quick_latents if quick else self._latents(self.batch), arrived)
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

    @property
    def _all_large(self) -> bool:
        """Whether no request is small, so that a small one that comes would wait only for large ones."""
        return all(request.missing > SMALL for request in self._requests)

    def _portions(self, batch: int) -> list[_Portion]:
        """The part of each request in a step of at most `batch` rows, in the order in which they get the decoder."""
        requests = list(self._requests.items())
        bound = largest_peer([Load(request.missing, 1) for request, _ in requests])
        needed = sum(len(progress.rows) + request.least for request, progress in requests if request.missing <= bound)
        # beside enough candidates that are needed anyway, others would only delay them
        sparing = needed >= self._enough
        loads, full = [], []
        for request, progress in requests:
            # no new network calls for a request whose latents pile up before the decoder
            full.append(len(progress.latents) >= 2 * self.batch)
            rows = 0 if full[-1] else len(progress.rows) + (request.least if sparing else request.wants)
            loads.append(Load(request.missing, rows or len(progress.latents), progress.served, progress.client))
        self._steps += 1
        shared = share(loads, batch, self._costs)
        granted_all = self._turns.correct(loads, shared, batch, self._costs)
        turn, bound = granted_all != shared, largest_peer(loads)
        portions = []
        for (request, progress), load, blocked, granted in zip(requests, loads, full, granted_all, strict=True):
            if granted:
                progress.served = self._steps
            latents = self._latents(self.batch if granted and (turn or load.missing <= bound) else granted)
            portions.append(_Portion(request, progress, 0 if blocked else granted, latents, sparing))
        # the smallest requests first, but in a turn those whose latents have waited longest
        return sorted(portions, key=lambda one: one.progress.decoded if turn else one.request.missing)

    def _latents(self, rows: int) -> int:
        """Latents to decode per step with so many rows: twice the average, because rows finish in groups.

        A whole batch may have those that have waited for each other.
        """
        return max(DECODER_ROWS if rows == self.batch else 0, -(-2 * rows // self._calls))

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
        drawn = [one.request.draw(one.rows - len(one.progress.rows), sparing=one.sparing) for one in portions]
        numbers = np.concatenate([some for some, _ in drawn])
        seeds = np.repeat(np.array([one.request.seed for one in portions]), [len(some) for some, _ in drawn])
        classes = [labels for _, labels in drawn if labels is not None]
        rows = self._trajectories.begin(seeds, numbers, np.concatenate(classes) if classes else None, steps).tolist()
        for one, (some, _) in zip(portions, drawn, strict=True):
            own, rows = rows[: len(some)], rows[len(some) :]
            one.progress.rows |= dict(zip(own, some.tolist(), strict=True))

    def _decode(
        self, portions: Sequence[_Portion], group: int, arrived: Callable[[], bool]
    ) -> list[tuple[Request, list[ImageDone]]]:
        """Decode some of the waiting latents, `group` at a time, and offer the images to their requests."""
        waiting = [portion for portion in portions if portion.progress.latents and portion.latents]
        left = self._latents(self.batch)
        allowed = [min(portion.latents, len(portion.progress.latents)) for portion in waiting]
        if sum(allowed) < min(DECODER_ROWS, sum(portion.rows for portion in portions) // 2) and not any(
            self._presses(portion) for portion in waiting if portion.latents >= left
        ):
            return []
        done: list[tuple[Request, list[ImageDone]]] = []
        while True:
            taken: list[tuple[_Portion, list[_Latent]]] = []
            room = min(left, group)
            for place, portion in enumerate(waiting):
                some = self._take(portion, min(room, allowed[place]))
                allowed[place] -= len(some)
                room -= len(some)
                left -= len(some)
                if some:
                    taken.append((portion, some))
            if not taken:
                return done
            done += self._finish(taken)
            if arrived():
                return done

    def _presses(self, portion: _Portion) -> bool:
        """Whether latents of a request have waited long, or it waits for nothing else."""
        age = self._steps - portion.progress.latents[0].step
        return age >= DECODER_WAIT or not (portion.progress.rows or portion.request.wants)

    def _take(self, portion: _Portion, most: int) -> list[_Latent]:
        """Take latents of a request, oldest first, and drop those of classes that have no open place any more."""
        taken: list[_Latent] = []
        latents = portion.progress.latents
        while latents and len(taken) < most:
            one = latents.popleft()
            if portion.request.needs(one.number):
                taken.append(one)
            else:
                portion.request.abandon(one.number)
        return taken

    def _finish(self, taken: Sequence[tuple[_Portion, list[_Latent]]]) -> list[tuple[Request, list[ImageDone]]]:
        """Decode latents, and offer the images to their requests."""
        latents = torch.stack([one.latent for _, some in taken for one in some])
        images, probabilities = self.generator.finish(latents)
        done, first = [], 0
        for portion, some in taken:
            portion.progress.decoded = self._steps
            part = slice(first, first + len(some))
            numbers = np.array([one.number for one in some])
            found = None if probabilities is None else probabilities[part]
            accepted = portion.request.offer(numbers, images[part], found)
            records = portion.progress.records
            images_done = [
                ImageDone(one.place, one.image, records[one.candidate], one.probabilities) for one in accepted
            ]
            done.append((portion.request, images_done))
            first = part.stop
        return done
