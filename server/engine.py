"""The engine: the one thread that owns the models, and how requests come to it and images come back."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rapid.errors import RapidError
from server.line import Line, Made, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rapid.generate import Generator
    from rapid.order import Order

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
    """

    order: Order
    model: str
    client: str
    _engine: Engine
    _loop: asyncio.AbstractEventLoop
    _found: asyncio.Queue[list[Made] | Exception] = field(default_factory=asyncio.Queue)
    cancelled: bool = False

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
        """Nobody waits any more: its rows are free before the next step. May be called again, and when all is done."""
        self.cancelled = True
        self._engine.wake()

    def tell(self, found: list[Made] | Exception) -> None:
        """From the engine's thread to whoever waits; nobody may, if their loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._found.put_nowait, found)
        except RuntimeError:
            self.cancelled = True


class Engine:
    """Runs models in a thread of its own; several share the time evenly while they have orders.

    Args:
        generators: models by name.
        batch: most rows of a step; None: measured.
        max_queued: images that wait or are being made, of all clients.
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
        self._rate = 0.0
        self._asked: list[tuple[str, int, Future[NDArray[np.uint8]]]] = []
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
            waiting = [job for jobs in self._jobs.values() for job in jobs if not job.cancelled]
            own = sum(job.order.missing for job in waiting if job.client == client)
            total = sum(job.order.missing for job in waiting)
            if own + count > self._max_client:
                words = f"{own} of your images are waiting, and at most {self._max_client} may: ask for fewer, or later"
                raise ClientFullError(words, self._seconds_until(own + count - self._max_client))
            if total + count > self._max_queued:
                words = f"{total} images are waiting, and at most {self._max_queued} may: ask for fewer, or later"
                raise EngineFullError(words, self._seconds_until(total + count - self._max_queued))
            self._jobs[model].append(job)
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
            self._asked.append((model, entry, future))
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
        return math.ceil(min(3600, max(1, images / self._rate if self._rate else 10)))

    def _run(self) -> None:
        try:
            for line in self._lines.values():
                if not self._stopping:
                    line.measure()
            if not self._draining:
                self.ready.set()
            while (name := self._next()) is not None:
                self._step(name)
        except Exception:
            # such as a network that cannot make even the first image
            _LOG.exception("the engine failed")
            self.drain()
        finally:
            self._refuse()

    def _next(self) -> str | None:
        """Wait for work, take in what came and leave out what was cancelled; the model whose turn it is."""
        with self._changed:
            while True:
                self._answer()
                for name, jobs in self._jobs.items():
                    self._tidy(name, jobs)
                active = [name for name, jobs in self._jobs.items() if jobs]
                if self._stopping:
                    return None
                if active:
                    break
                self._changed.wait()
            for name in self._spent:
                if name not in active:
                    # who rests saves up nothing
                    self._spent[name] = max(self._spent[name], min(self._spent[other] for other in active))
            return min(active, key=self._spent.__getitem__)

    def _answer(self) -> None:
        """Make the pictures that were asked for."""
        for model, entry, future in self._asked:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._lines[model].generator.entry_image(entry))
                except Exception as error:
                    future.set_exception(error)
        self._asked.clear()

    def _tidy(self, name: str, jobs: list[Job]) -> None:
        line = self._lines[name]
        for job in jobs:
            if job.cancelled:
                line.remove(job.order)
            elif job.order.missing:
                line.add(job.order)
        jobs[:] = [job for job in jobs if not job.cancelled and job.order.missing]

    def _step(self, name: str) -> None:
        line = self._lines[name]
        try:
            step = line.step()
        except Exception:
            _LOG.exception("a step of %s failed", name)
            line.clear()
            with self._changed:
                failed = self._jobs[name].copy()
                self._jobs[name].clear()
            for job in failed:
                job.tell(EngineFailedError())
            return
        self._spent[name] += step.seconds
        images = sum(len(made) for _, made in step.made)
        # over the last hundred steps or so
        self._rate += 0.02 * (images / step.seconds - self._rate)
        jobs = {job.order: job for job in self._jobs[name]}
        for order, made in step.made:
            if made:
                jobs[order].tell(made)
        if self._watcher is not None:
            self._watcher.stepped(name, line.batch, step)

    def _refuse(self) -> None:
        """Let all that wait fail."""
        with self._changed:
            self._stopping = True
            left = [job for jobs in self._jobs.values() for job in jobs]
            for jobs in self._jobs.values():
                jobs.clear()
            for _, _, future in self._asked:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStoppedError())
            self._asked.clear()
        for job in left:
            job.tell(EngineStoppedError())
