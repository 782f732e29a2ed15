"""The encoder: PNGs of many images at once, on all cores and off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rapid.pictures import Pixels

PORTION = 32
"""Images that a thread encodes at a time: about a millisecond, and the images of other requests go between."""
MOST_THREADS = 8
"""A thread encodes more than ten thousand small images a second, which is more than a model makes."""
Encoded = TypeVar("Encoded")


class Encoder:
    """Threads that encode images. Compression releases the interpreter, so that they run beside each other.

    Args:
        threads: None takes one for each core, and at most `MOST_THREADS`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or min(MOST_THREADS, os.cpu_count() or 1), "rapid-encoder")

    async def map(self, encode: Callable[[Pixels], Encoded], images: Sequence[Pixels]) -> list[Encoded]:
        """`encode` of each image, uint8 (H, W) or (H, W, 3), in their order; raises what it raises."""
        loop = asyncio.get_running_loop()
        parts = [images[first : first + PORTION] for first in range(0, len(images), PORTION)]
        encoded = await asyncio.gather(*(loop.run_in_executor(self._pool, _encode_all, encode, part) for part in parts))
        return [one for part in encoded for one in part]

    def close(self) -> None:
        """Drop what waits, and wait for the threads; may be called more than once."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _encode_all(encode: Callable[[Pixels], Encoded], images: Sequence[Pixels]) -> list[Encoded]:
    return [encode(image) for image in images]
