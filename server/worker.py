"""The one thread that owns the model: it makes the requests one after the other, and the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rapid.errors import RapidError

if TYPE_CHECKING:
    from rapid.generate import Generator, Samples


class WorkerStoppedError(RapidError):
    """The worker was told to stop before the images were made."""


class Worker:
    """Runs a generator in a thread of its own.

    A request that fails raises in its caller and leaves the worker as it was. After `stop`, what runs, what waits and
    what comes raises WorkerStoppedError at once; the thread itself ends after its current batch of images.
    """

    def __init__(self, generator: Generator, made: Callable[[int, float], None] | None = None) -> None:
        """Start the thread; `made(images, seconds)` is called in it after each request that succeeds."""
        self._generator = generator
        self._made = made
        self._stopping = threading.Event()
        self._asked: set[asyncio.Future[Samples]] = set()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rapid-worker")

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return not self._stopping.is_set()

    async def generate(self, count: int, labels: Sequence[int] | None, seed: int | None) -> Samples:
        """Make images in the worker's thread, after the requests that came before; see `Generator.generate`.

        If the caller is cancelled while the request waits, it is never begun.
        """
        if not self.running:
            raise WorkerStoppedError
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, self._generate, count, labels, seed)
        self._asked.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            if self.running:
                raise
            raise WorkerStoppedError from None
        finally:
            self._asked.discard(future)

    def stop(self) -> None:
        """Let requests fail from now on; may be called in any thread, and returns at once."""
        self._stopping.set()
        for future in self._asked.copy():
            future.get_loop().call_soon_threadsafe(future.cancel)

    def close(self) -> None:
        """Stop, and wait until the thread has ended; may be called again."""
        self.stop()
        self._executor.shutdown(wait=True)

    def _generate(self, count: int, labels: Sequence[int] | None, seed: int | None) -> Samples:
        self._check(0, count)
        start = time.perf_counter()
        samples = self._generator.generate(count, labels=labels, seed=seed, progress=self._check)
        if self._made is not None:
            self._made(count, time.perf_counter() - start)
        return samples

    def _check(self, done: int, total: int) -> None:
        if self._stopping.is_set() and done < total:
            raise WorkerStoppedError
