"""The engine: the thread that owns the models, the queue of requests before it, and the images that come back."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from rapid.errors import RapidError
from rapid_server.fair_queue import FairQueue
from rapid_server.job import Job, deliver
from rapid_server.worker import Step, Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rapid.sampling.generator import Generator

MOST_RECORDS, MOST_OWN_RECORDS = 512, 128
"""Images of records that may wait, of all clients and of one."""
LATER = "ask for fewer, or later"
_LOG = logging.getLogger(__name__)


class EngineStoppedError(RapidError):
    """The engine was told to stop before the images were made."""


class EngineFailedError(RapidError):
    """A step failed; the traceback is in the log."""


class EngineFullError(RapidError):
    """The queue is full.

    Attributes:
        retry_after: seconds until there is probably room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClientFullError(EngineFullError):
    """The queue is full for one client."""


class Observer(Protocol):
    """Gets a report of each step, in the engine's thread."""

    def stepped(self, model: str, batch: int, step: Step) -> None:
        """Called after each step of a model."""


@dataclass(frozen=True, eq=False)
class _RecordRequest:
    """A request for the image of a knowledge base record."""

    model: str
    record: int
    client: str
    future: Future[NDArray[np.uint8]]


class _Work(NamedTuple):
    """What the thread does next."""

    model: str | None
    """The model that takes a step."""
    record: _RecordRequest | None


class Engine:
    """Runs models in a thread of its own. Models that have requests get equal shares of the time.

    Args:
        generators: models by name.
        batch: maximum rows of a step; None measures it at the start.
        max_queued: maximum images of all clients that are queued, being made, or made and not yet sent.
        max_client: the same for one client.
        observer: gets a report of each step.

    Attributes:
        ready: set when each model has made its first image, and cleared when the engine accepts no more requests.
        failed: whether it ended by an error, which is logged; no later request can succeed.
    """

    def __init__(
        self,
        generators: Mapping[str, Generator],
        *,
        batch: int | None = None,
        max_queued: int = 50_000,
        max_client: int = 20_000,
        observer: Observer | None = None,
    ) -> None:
        self._workers = {name: Worker(generator, batch) for name, generator in generators.items()}
        self._jobs: dict[str, list[Job]] = {name: [] for name in generators}
        self._seconds_used = dict.fromkeys(generators, 0.0)
        # decaying sums over about the last fifty steps
        self._recent_images = self._recent_seconds = 0.0
        self._records: FairQueue[_RecordRequest] = FairQueue()
        # jobs whose responses are not complete; weak, so that a job that was lost somewhere does not count for ever
        self._open: weakref.WeakSet[Job] = weakref.WeakSet()
        self._max_queued, self._max_client = max_queued, max_client
        self._observer = observer
        self._changed = threading.Condition()
        self._draining = self._stopping = self._arrived = False
        self.ready = threading.Event()
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="rapid-engine", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Images that are queued or being made."""
        with self._changed:
            return sum(job.request.missing for jobs in self._jobs.values() for job in jobs)

    @property
    def queued_seconds(self) -> float:
        """Estimated seconds to make the images that are queued or being made; 0 before the first step."""
        return self.queued * self._recent_seconds / self._recent_images if self._recent_images else 0.0

    @property
    def idle(self) -> bool:
        """Whether there are no jobs."""
        with self._changed:
            return not any(self._jobs.values())

    def submit(
        self,
        model: str,
        count: int,
        labels: Sequence[int] | None = None,
        seed: int | None = None,
        steps: int | None = None,
        *,
        client: str = "",
        weight: int = 1,
    ) -> Job:
        """Queue a request; call it from a coroutine.

        Args:
            model: its name.
            count: for this and the following ones see `rapid.sampling.generate.make_request`.
            labels: see there.
            seed: see there.
            steps: see there.
            client: who sends it.
            weight: as how many images each counts.

        Raises:
            InputError: an argument is out of range.
            EngineFullError: the queue is full; ClientFullError if it is full for this client.
            EngineStoppedError: the engine accepts no more requests.
        """
        request = self._workers[model].make_request(count, labels, seed, steps)
        job = Job(request, model, client, self.wake, asyncio.get_running_loop(), weight)
        with self._changed:
            if self._draining or self._stopping:
                raise EngineStoppedError
            # images that are made and not yet sent count: slow readers must not fill the memory
            held = [(job.client, job.held) for job in self._open]
            own = sum(images for owner, images in held if owner == client)
            total = sum(images for _, images in held)
            each = f" (each of {model} counts as {weight})" if weight > 1 else ""
            if (over := own + weight * count - self._max_client) > 0:
                problem = f"{own} of your images are waiting, of at most {self._max_client}{each}: {LATER}"
                raise ClientFullError(problem, self._seconds_for(over / weight))
            if (over := total + weight * count - self._max_queued) > 0:
                problem = f"{total} images are waiting, of at most {self._max_queued}{each}: {LATER}"
                raise EngineFullError(problem, self._seconds_for(over / weight))
            self._jobs[model].append(job)
            self._open.add(job)
            self._arrived = True
            self._changed.notify()
        return job

    async def record_image(self, model: str, record: int, *, client: str = "") -> NDArray[np.uint8]:
        """The public image of a knowledge base record, made between two steps; uint8 (H, W) or (H, W, 3).

        Clients take turns.

        Raises:
            InputError: there is no such record.
            EngineFullError: too many others are waiting; ClientFullError if they are this client's.
            EngineStoppedError: the engine is stopping.
        """
        asked = _RecordRequest(model, record, client, Future())
        with self._changed:
            if self._stopping:
                raise EngineStoppedError
            if (own := self._records.held(client)) >= MOST_OWN_RECORDS:
                raise ClientFullError(f"{own} of your images of records are waiting: ask later", self._seconds_for(own))
            if (waiting := len(self._records)) >= MOST_RECORDS:
                raise EngineFullError(f"{waiting} images of records are waiting: ask later", self._seconds_for(waiting))
            self._records.put(client, asked)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(asked.future)
        finally:
            with self._changed:
                # a client that has gone makes room
                self._records.remove(client, asked)

    def wake(self) -> None:
        """Make the thread look at the jobs again."""
        with self._changed:
            self._changed.notify()

    def drain(self) -> None:
        """Accept no more requests; the current jobs go on."""
        with self._changed:
            self._draining = True
            self.ready.clear()

    def stop(self) -> None:
        """Accept no more requests, and end the current jobs with EngineStoppedError; return at once."""
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the thread has ended; may be called more than once."""
        self.stop()
        self.wait()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _seconds_for(self, images: float) -> int:
        """Estimated whole seconds to make so many images, 1..3600; 10 before the first step."""
        estimate = images * self._recent_seconds / self._recent_images if self._recent_images else 10
        return math.ceil(min(3600, max(1, estimate)))

    def _run(self) -> None:
        try:
            for worker in self._workers.values():
                if not self._stopping:
                    worker.measure()
            with self._changed:
                if not self._draining:
                    self.ready.set()
            while (work := self._next()) is not None:
                if work.record is not None:
                    self._make_record_image(work.record)
                if work.model is not None:
                    self._step(work.model)
        except Exception:
            # for example a model that cannot make its first image
            _LOG.exception("the engine failed")
            self.failed = True
            self.drain()
        finally:
            self._reject_all()

    def _next(self) -> _Work | None:
        """Wait for work, pass new requests to the workers and remove cancelled ones; None means stop.

        At most one record image between two steps: many of them must not delay other clients' images.
        """
        with self._changed:
            while True:
                self._arrived = False
                for name, jobs in self._jobs.items():
                    self._sync(name, jobs)
                active = [name for name, jobs in self._jobs.items() if jobs]
                if self._stopping:
                    return None
                record = self._records.take()[1] if len(self._records) else None
                if not active and record is not None:
                    return _Work(None, record)
                if active:
                    break
                self._changed.wait()
            for name in self._seconds_used:
                if name not in active:
                    # an idle model does not save up time
                    least = min(self._seconds_used[other] for other in active)
                    self._seconds_used[name] = max(self._seconds_used[name], least)
            return _Work(min(active, key=self._seconds_used.__getitem__), record)

    def _make_record_image(self, asked: _RecordRequest) -> None:
        """Make a record image; without the lock, for which the event loop would have to wait."""
        if asked.future.set_running_or_notify_cancel():
            try:
                generator = self._workers[asked.model].generator
                asked.future.set_result(generator.record_images(np.array([asked.record]))[0])
            except Exception as error:
                asked.future.set_exception(error)

    def _sync(self, name: str, jobs: list[Job]) -> None:
        """Make the worker's requests those of the jobs, and forget jobs that are cancelled or complete."""
        worker, kept = self._workers[name], []
        for job in jobs:
            # read once: it can change at any moment, and the worker must not keep a request without its job
            if job.cancelled:
                worker.remove(job.request)
            elif job.request.missing:
                worker.add(job.request, job.client)
                kept.append(job)
        jobs[:] = kept

    def _step(self, name: str) -> None:
        worker, start = self._workers[name], time.perf_counter()
        try:
            step = worker.step(lambda: self._arrived)
        except Exception:
            _LOG.exception("a step of %s failed", name)
            # or the failing model would always be next
            self._seconds_used[name] += time.perf_counter() - start
            if not worker.device_answers():
                # as after an illegal access to a GPU's memory: whatever this process asks of it fails from then on
                raise RapidError("the device does not answer any more; start the server again") from None
            self._fail(name)
            return
        self._seconds_used[name] += step.seconds
        images = sum(len(done) for _, done in step.images)
        self._recent_images = 0.98 * self._recent_images + images
        self._recent_seconds = 0.98 * self._recent_seconds + step.seconds
        if self._observer is not None:
            # before the images: a client that has its response must find it counted
            self._observer.stepped(name, worker.batch, step)
        job_of = {job.request: job for job in self._jobs[name]}
        deliver((job_of[request], done) for request, done in step.images if done)

    def _fail(self, name: str) -> None:
        """End the jobs that took part in a failed step; those that came later had no part in it."""
        worker = self._workers[name]
        lost = worker.requests
        worker.clear()
        with self._changed:
            jobs = self._jobs[name]
            failed = [job for job in jobs if job.request in lost]
            jobs[:] = [job for job in jobs if job.request not in lost]
        deliver((job, EngineFailedError()) for job in failed)

    def _reject_all(self) -> None:
        """End everything that waits with EngineStoppedError."""
        with self._changed:
            self._stopping = True
            left = [job for jobs in self._jobs.values() for job in jobs]
            for jobs in self._jobs.values():
                jobs.clear()
            records = self._records.clear()
        for record in records:
            if record.future.set_running_or_notify_cancel():
                record.future.set_exception(EngineStoppedError())
        deliver((job, EngineStoppedError()) for job in left)
