"""The engine: the one thread that owns the models, and how requests come to it and images come back."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rapid.errors import RapidError
from rapid_server.line import Line, Made, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rapid.methods.rapid.generator import Generator
    from rapid.sampling.request import Order

_LOG = logging.getLogger(__name__)


class EngineStoppedError(RapidError):
    """The engine was told to stop before the images were made."""


class EngineFailedError(RapidError):
    """A step failed; the log says how."""


class EngineFullError(RapidError):
    """Too many images are waiting.

    Attributes:
        retry_after: seconds after which there is probably room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClientFullError(EngineFullError):
    """Too many images are waiting for this one client."""


class Watcher(Protocol):
    """Is told what the engine does, in its thread."""

    def stepped(self, model: str, batch: int, step: Step) -> None:
        """After each step."""


@dataclass(eq=False)
class Job:
    """A request's images, as they are made: `async for made in job`.

    Attributes:
        order: what was asked for.
        model: name of the model.
        client: whose it is.
        taken: images that are sent: they need no memory any more.
    """

    order: Order
    model: str
    client: str
    _engine: Engine
    _loop: asyncio.AbstractEventLoop
    _found: asyncio.Queue[list[Made] | Exception] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    taken: int = 0

    @property
    def held(self) -> int:
        """Images that wait, are being made, or are made and not yet sent."""
        return 0 if self.cancelled else self.order.count - self.taken

    async def __aiter__(self) -> AsyncIterator[list[Made]]:
        """Images in the order in which they are done; raises what ended the job before its time."""
        left = self.order.count
        while left:
            found = await self._found.get()
            if isinstance(found, Exception):
                raise found
            left -= len(found)
            yield found

    def cancel(self) -> None:
        """Nobody waits any more: its rows are free before the next step. To be called when all is sent, too."""
        self.cancelled = True
        self._engine.wake()

    def tell(self, found: list[Made] | Exception) -> None:
        """From the engine's thread to whoever waits; nobody may, if their loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._found.put_nowait, found)
        except RuntimeError:
            self.cancelled = True


class _Asked(NamedTuple):
    """A picture that somebody waits for."""

    model: str
    entry: int
    future: Future[NDArray[np.uint8]]


class _Work(NamedTuple):
    """What the thread does next."""

    model: str | None
    """Takes a step."""
    asked: _Asked | None


class Engine:
    """Runs models in a thread of its own; several share the time evenly while they have orders.

    Args:
        generators: models by name.
        batch: most rows of a step; None: measured.
        max_queued: images of all clients that wait, are being made, or are made and not yet sent.
        max_client: the same, of one client.
        watcher: is told of each step.
    """

    def __init__(
        self,
        generators: Mapping[str, Generator],
        *,
        batch: int | None = None,
        max_queued: int = 50_000,
        max_client: int = 20_000,
        watcher: Watcher | None = None,
    ) -> None:
        self._lines = {name: Line(generator, batch) for name, generator in generators.items()}
        self._jobs: dict[str, list[Job]] = {name: [] for name in generators}
        self._spent = dict.fromkeys(generators, 0.0)
        # of the last hundred steps or so
        self._images = self._seconds = 0.0
        self._asked: deque[_Asked] = deque()
        # of those whose answers are not yet sent; whatever becomes of an answer, a job that nobody knows does not count
        self._open: weakref.WeakSet[Job] = weakref.WeakSet()
        self._max_queued, self._max_client = max_queued, max_client
        self._watcher = watcher
        self._changed = threading.Condition()
        self._draining = self._stopping = False
        self.ready = threading.Event()
        """Set when each model has made its first image, until intake ends."""
        self._thread = threading.Thread(target=self._run, name="rapid-engine", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Images that wait or are being made."""
        with self._changed:
            return sum(job.order.missing for jobs in self._jobs.values() for job in jobs)

    @property
    def idle(self) -> bool:
        """Whether there is no job."""
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
    ) -> Job:
        """Take a request, from a coroutine; see `Generator.order` for the arguments.

        Raises:
            InputError: an argument out of range.
            EngineFullError: too many images wait; ClientFullError: too many of this client.
            EngineStoppedError: the engine takes no more.
        """
        order = self._lines[model].generator.order(count, labels, seed, steps)
        job = Job(order, model, client, self, asyncio.get_running_loop())
        with self._changed:
            if self._draining or self._stopping:
                raise EngineStoppedError
            # with those that are made and not yet sent: who reads slowly must not fill the memory
            held = [(job.client, job.held) for job in self._open]
            own = sum(images for whose, images in held if whose == client)
            total = sum(images for _, images in held)
            if own + count > self._max_client:
                words = f"{own} of your images are waiting, and at most {self._max_client} may: ask for fewer, or later"
                raise ClientFullError(words, self._seconds_until(own + count - self._max_client))
            if total + count > self._max_queued:
                words = f"{total} images are waiting, and at most {self._max_queued} may: ask for fewer, or later"
                raise EngineFullError(words, self._seconds_until(total + count - self._max_queued))
            self._jobs[model].append(job)
            self._open.add(job)
            self._changed.notify()
        return job

    async def picture(self, model: str, entry: int) -> NDArray[np.uint8]:
        """The public image of an entry of a model's knowledge base, made between two steps.

        Raises:
            InputError: no such entry.
            EngineStoppedError: the engine takes no more.
        """
        future: Future[NDArray[np.uint8]] = Future()
        with self._changed:
            if self._stopping:
                raise EngineStoppedError
            self._asked.append(_Asked(model, entry, future))
            self._changed.notify()
        return await asyncio.wrap_future(future)

    def wake(self) -> None:
        """Something has changed."""
        with self._changed:
            self._changed.notify()

    def drain(self) -> None:
        """Take no more requests; those that are there go on."""
        with self._changed:
            self._draining = True
            self.ready.clear()

    def stop(self) -> None:
        """Take no more requests, and let those that are there fail with EngineStoppedError; returns at once."""
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the thread has ended; may be called again."""
        self.stop()
        self._thread.join()

    def _seconds_until(self, images: int) -> int:
        """When so many images will have been made, whole seconds in 1..3600."""
        return math.ceil(min(3600, max(1, images * self._seconds / self._images if self._images else 10)))

    def _run(self) -> None:
        try:
            for line in self._lines.values():
                if not self._stopping:
                    line.measure()
            with self._changed:
                if not self._draining:
                    self.ready.set()
            while (work := self._next()) is not None:
                if work.asked is not None:
                    self._answer(work.asked)
                if work.model is not None:
                    self._step(work.model)
        except Exception:
            # such as a network that cannot make even the first image
            _LOG.exception("the engine failed")
            self.drain()
        finally:
            self._refuse()

    def _next(self) -> _Work | None:
        """Wait for work, take in what came and leave out what was cancelled; None: stop.

        One picture between two steps: many do not hold up those who wait for images.
        """
        with self._changed:
            while True:
                for name, jobs in self._jobs.items():
                    self._tidy(name, jobs)
                active = [name for name, jobs in self._jobs.items() if jobs]
                if self._stopping:
                    return None
                asked = self._asked.popleft() if self._asked else None
                if not active and asked is not None:
                    return _Work(None, asked)
                if active:
                    break
                self._changed.wait()
            for name in self._spent:
                if name not in active:
                    # who rests saves up nothing
                    self._spent[name] = max(self._spent[name], min(self._spent[other] for other in active))
            return _Work(min(active, key=self._spent.__getitem__), asked)

    def _answer(self, asked: _Asked) -> None:
        """Make a picture that was asked for; without the lock, for which the event loop would wait."""
        if asked.future.set_running_or_notify_cancel():
            try:
                asked.future.set_result(self._lines[asked.model].generator.entry_image(asked.entry))
            except Exception as error:
                asked.future.set_exception(error)

    def _tidy(self, name: str, jobs: list[Job]) -> None:
        line, kept = self._lines[name], []
        for job in jobs:
            # looked at once: it may be cancelled at any moment, and must not stay in the line without its job
            if job.cancelled:
                line.remove(job.order)
            elif job.order.missing:
                line.add(job.order)
                kept.append(job)
        jobs[:] = kept

    def _step(self, name: str) -> None:
        line, begin = self._lines[name], time.perf_counter()
        try:
            step = line.step()
        except Exception:
            _LOG.exception("a step of %s failed", name)
            # or it would always be its turn
            self._spent[name] += time.perf_counter() - begin
            lost = line.orders
            line.clear()
            with self._changed:
                jobs = self._jobs[name]
                # those that came meanwhile had no part in it
                failed = [job for job in jobs if job.order in lost]
                jobs[:] = [job for job in jobs if job.order not in lost]
            for job in failed:
                job.tell(EngineFailedError())
            return
        self._spent[name] += step.seconds
        images = sum(len(made) for _, made in step.made)
        self._images = 0.98 * self._images + images
        self._seconds = 0.98 * self._seconds + step.seconds
        if self._watcher is not None:
            # before whoever has an answer can ask for the numbers
            self._watcher.stepped(name, line.batch, step)
        told = {job.order: job for job in self._jobs[name]}
        for order, made in step.made:
            if made:
                told[order].tell(made)

    def _refuse(self) -> None:
        """Let all that wait fail."""
        with self._changed:
            self._stopping = True
            left = [job for jobs in self._jobs.values() for job in jobs]
            for jobs in self._jobs.values():
                jobs.clear()
            asked = list(self._asked)
            self._asked.clear()
        for _, _, future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStoppedError())
        for job in left:
            job.tell(EngineStoppedError())
