"""Jobs: the requests in the engine, and how their images reach the event loops that wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from rapid.sampling.request import Request
    from rapid_server.worker import ImageDone

    Result = list[ImageDone] | Exception
    """Images of a job, or what ended it early."""


@dataclass(eq=False)
class Job:
    """A request in the engine; iterate over it with `async for` to get its images in batches.

    Attributes:
        request: what was asked for.
        model: name of the model.
        client: who sent it.
        wake: makes the engine look at its jobs again.
        loop: the event loop in which somebody waits for the images.
        weight: as how many images each counts.
        sent: number of images that were sent; they need no memory any more.
        cancelled: whether `cancel` was called.
    """

    request: Request
    model: str
    client: str
    wake: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    weight: int = 1
    _results: asyncio.Queue[Result] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    sent: int = 0

    @property
    def held(self) -> int:
        """As how many images count those that are queued, being made, or made and not yet sent."""
        return 0 if self.cancelled else self.weight * (self.request.count - self.sent)

    async def __aiter__(self) -> AsyncIterator[list[ImageDone]]:
        """Images in the order in which they are finished; raises the exception that ended the job early."""
        left = self.request.count
        while left:
            result = await self._results.get()
            if isinstance(result, Exception):
                raise result
            left -= len(result)
            yield result

    def put(self, result: Result) -> None:
        """Pass a result to who waits for it; in the job's event loop."""
        self._results.put_nowait(result)

    def cancel(self) -> None:
        """End the job; its rows are free before the next step. Call it also when all images have been sent."""
        self.cancelled = True
        self.wake()


def deliver(results: Iterable[tuple[Job, Result]]) -> None:
    """Pass results from the engine's thread to the event loops of their jobs.

    Each loop is woken once: it computes while the engine's thread waits for the interpreter.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Result]]] = {}
    for job, result in results:
        by_loop.setdefault(job.loop, []).append((job, result))
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, own)
        except RuntimeError:
            # the loop is closed, so nobody waits
            for job, _ in own:
                job.cancelled = True


def _put(results: list[tuple[Job, Result]]) -> None:
    for job, result in results:
        job.put(result)
