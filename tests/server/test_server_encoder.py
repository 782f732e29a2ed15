"""The encoder: the order of images, errors, and an event loop that stays free."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from rapid_server.encoder import PORTION, Encoder

from rapid.pictures import Pixels, encode_png


@pytest.mark.parametrize("count", [0, 1, PORTION, 5 * PORTION + 3])
def test_in_their_order(count: int) -> None:
    images = [np.full((3, 4), number % 251, np.uint8) for number in range(count)]
    encoder = Encoder(3)
    assert asyncio.run(encoder.map(encode_png, images)) == [encode_png(image) for image in images]
    encoder.close()
    encoder.close()


def test_in_several_threads_beside_the_event_loop() -> None:
    """Two portions wait for each other, and the loop goes on meanwhile."""
    both, turns = threading.Barrier(2, timeout=20), 0

    def encode(image: Pixels) -> int:
        if image[0, 0] == 0:
            both.wait()
        time.sleep(0.001)
        return threading.get_ident()

    async def work() -> list[int]:
        nonlocal turns
        images = [np.full((1, 1), number % PORTION, np.uint8) for number in range(2 * PORTION)]
        task = asyncio.create_task(encoder.map(encode, images))
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        return task.result()

    encoder = Encoder(2)
    threads = asyncio.run(work())
    assert len(set(threads)) == 2
    assert threading.get_ident() not in threads
    assert turns > 3
    encoder.close()


def test_errors_are_raised() -> None:
    encoder = Encoder()
    with pytest.raises(ValueError, match="should be uint8"):
        asyncio.run(encoder.map(encode_png, [np.zeros((2, 2), np.uint8), np.zeros(4, np.uint8)]))
    encoder.close()
