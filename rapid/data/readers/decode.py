"""Decoding many images in parallel, in parts, into one array."""

from __future__ import annotations

import io
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rapid.data.origin import Origin
from rapid.data.readers.form import CHANGES, Formed, TooDeepError, describe, to_form
from rapid.data.readers.source import Source
from rapid.mapped import Growing
from rapid.stopping import check_stop

PART = 64
"""Images that a thread decodes at a time."""
DAMAGED = "is not a readable image (damaged or truncated); repair or remove it"
DEEPER = "has more than 16 bits a channel; convert it to 8 or 16 bits"


class Encoded(NamedTuple):
    """An image as it is stored."""

    name: str
    """Of its file, or of its place in a larger one; for messages."""
    content: bytes | None = None
    """None: that of the file `name`."""


class Decoded(NamedTuple):
    """All images of a set."""

    images: NDArray[np.uint8]
    """(N, H, W) or (N, H, W, 3); mapped from a scratch file if they are large."""
    notes: tuple[str, ...]
    """What was done to them, at most one sentence."""
    origins: tuple[Origin, ...]
    """The private models that made some of them."""


class _Unreadable(NamedTuple):
    problem: str


def decode(encoded: Iterable[Encoded], source: Source) -> Decoded:
    """Decode images and bring them to the common form; all must then have one size and colour mode.

    Args:
        encoded: at least one.
        source: for messages.

    Raises:
        InputError: no images, one that cannot be read, or several sizes or colour modes.
        Stopped: a stop was requested.
    """
    counts: Counter[str] = Counter()
    origins: dict[Origin, None] = {}
    shape: tuple[int, ...] | None = None
    pixels = Growing()
    try:
        for part, found in _decoded(encoded):
            check_stop()
            for one, image in zip(part, found, strict=True):
                if isinstance(image, _Unreadable):
                    what = "an image" if image.problem == DEEPER else "a file"
                    raise source.error(f"{what} {image.problem}", image.problem, one.name)
                shape = shape or image.pixels.shape
                if image.pixels.shape != shape:
                    convert = "convert all images to one size and colour mode"
                    name, is_now = Path(one.name).name, describe(image.pixels.shape)
                    detail = f"{name} is {is_now}, expected {describe(shape)} like the first image; {convert}"
                    raise source.error(f"the images have several sizes or colour modes; {convert}", detail)
                counts.update(image.changes)
                origins.update(dict.fromkeys(image.origins))
            pixels.append(np.stack([image.pixels for image in found if isinstance(image, Formed)]))
        if shape is None:
            raise source.error("has no images")
        images = pixels.finish()
    finally:
        pixels.close()
    return Decoded(images, _notes(counts, len(images)), tuple(origins))


def _notes(counts: Counter[str], total: int) -> tuple[str, ...]:
    said = [f"{counts[change]:,} {change}" for change in CHANGES if counts[change]]
    return (f"of {total:,} images {'; '.join(said)}",) if said else ()


def _decoded(encoded: Iterable[Encoded]) -> Iterator[tuple[list[Encoded], list[Formed | _Unreadable]]]:
    """Parts of the images in their order, while others are being decoded."""
    # registering all formats is not safe in several threads
    Image.init()
    workers = min(32, os.cpu_count() or 1)
    waiting: deque[tuple[list[Encoded], Future[list[Formed | _Unreadable]]]] = deque()
    left = iter(encoded)
    with ThreadPoolExecutor(workers, "decode") as pool:
        try:
            while part := list(islice(left, PART)):
                waiting.append((part, pool.submit(_decode_part, part)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            for done, future in waiting:
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _decode_part(part: list[Encoded]) -> list[Formed | _Unreadable]:
    return [_decode_one(one) for one in part]


def _decode_one(one: Encoded) -> Formed | _Unreadable:
    try:
        with Image.open(one.name if one.content is None else io.BytesIO(one.content)) as image:
            return to_form(image)
    except MemoryError:
        raise
    except TooDeepError:
        return _Unreadable(DEEPER)
    except Exception:  # decoders raise errors of all kinds for damaged files
        return _Unreadable(DAMAGED)
