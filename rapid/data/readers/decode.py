"""Decoding many images in parallel, in parts, into one array.

Each image is brought to the form of the set as soon as it is decoded, by itself; the originals are not kept.
"""

from __future__ import annotations

import io
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rapid.config.sections import ImageSettings
from rapid.data.canvas import Canvas
from rapid.data.fit import TooLargeError, fit_pixels
from rapid.data.origin import Origin
from rapid.data.readers.form import CHANGES, TooDeepError, describe, shape_of, to_form
from rapid.data.readers.source import Records, Source
from rapid.data.stored import DIGEST, Stored, digest_of
from rapid.errors import DENIED
from rapid.mapped import Growing
from rapid.stopping import check_stop

PART = 64
"""Images that a thread decodes at a time, at most."""
PART_BYTES = 8 << 20
"""Bytes of encoded images in a part: photographs are large."""
DAMAGED = "is not a readable image (damaged or truncated); repair or remove it"
VAST = "has more pixels than are opened (179 million); scale it down, or cut it into tiles"
DEEPER = "has more than 16 bits a channel; convert it to 8 or 16 bits"
CONVERT = "convert all images to one size and colour mode"

Result = TypeVar("Result")


class Encoded(NamedTuple):
    """An image as it is stored."""

    name: str
    """Of its file, or of its place in a larger one; for messages."""
    content: bytes | None = None
    """None: that of the file `name`."""

    @contextmanager
    def open(self) -> Iterator[Image.Image]:
        """The image, whose pixels are not read yet.

        Raises:
            Exception: of any kind, if it is damaged.
        """
        with ExitStack() as stack:
            # not by name: Pillow would map some files, and mix up the rows of TIFFs that lie on their side
            named = None if self.content is not None else stack.enter_context(open(self.name, "rb", opener=_at_once))
            yield stack.enter_context(Image.open(named or io.BytesIO(self.content or b"")))


def _at_once(name: str, flags: int) -> int:
    """Open a file; a pipe, too, at which nobody may ever write."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


class _Read(NamedTuple):
    """An image that was decoded."""

    pixels: NDArray[np.uint8]
    """In the form of the set."""
    shape: tuple[int, ...]
    """That it had: (H, W) or (H, W, 3)."""
    changes: tuple[str, ...]
    origins: tuple[Origin, ...]
    digest: bytes
    """Empty if it was not asked for."""


class _Unreadable(NamedTuple):
    general: str
    """What is wrong, without saying which image."""
    detail: str


def decode(encoded: Callable[[], Iterable[Encoded]], source: Source) -> Records:
    """Decode images and bring them to the form that is asked for, or else to the common form of their files.

    Args:
        encoded: the images, at least one; called twice if the form depends on their sizes.
        source: the form, and how much messages tell.

    Returns:
        Records without labels and people.

    Raises:
        InputError: no images, one that cannot be read or does not fit, or without a form several sizes or colour modes.
        Stopped: a stop was requested.
    """
    # registering all formats is not safe in several threads
    Image.init()
    form = _form_by_sizes(encoded(), source.target) if isinstance(source.target, Canvas) else source.target

    def read(one: Encoded) -> _Read | _Unreadable:
        return _decode_one(one, form, source.digests)

    counts: Counter[str] = Counter()
    origins: dict[Origin, None] = {}
    shapes: dict[tuple[int, ...], None] = {}
    digests = bytearray()
    pixels = Growing()
    try:
        for part, found in _each(encoded(), read):
            for one, image in zip(part, found, strict=True):
                if isinstance(image, _Unreadable):
                    raise source.error(image.general, image.detail, one.name)
                shapes[image.shape] = None
                if form is None and len(shapes) > 1:
                    name, is_now, first = Path(one.name).name, describe(image.shape), describe(next(iter(shapes)))
                    detail = f"{name} is {is_now}, expected {first} like the first image; {CONVERT}"
                    raise source.error(f"the images have several sizes or colour modes; {CONVERT}", detail)
                counts.update(image.changes)
                origins.update(dict.fromkeys(image.origins))
                digests += image.digest
            pixels.append(np.stack([image.pixels for image in found if isinstance(image, _Read)]))
        if not shapes:
            raise source.error("has no images")
        images = pixels.finish()
    finally:
        pixels.close()
    stored = Stored.of(shapes)
    return Records(
        images,
        notes=(*_notes(counts, len(images)), *stored.notes(form)),
        origins=tuple(origins),
        stored=stored,
        digests=np.frombuffer(bytes(digests), np.uint8).reshape(-1, DIGEST) if source.digests else None,
    )


def _form_by_sizes(encoded: Iterable[Encoded], canvas: Canvas) -> ImageSettings | None:
    """The form by the sizes of all images, of which the headers are read; damaged ones are reported later."""
    shapes = {shape for _, part in _each(encoded, _shape_of_one) for shape in part if shape is not None}
    return canvas.form(Stored.of(shapes)) if shapes else None


def _notes(counts: Counter[str], total: int) -> tuple[str, ...]:
    said = [f"{counts[change]:,} {change}" for change in CHANGES if counts[change]]
    return (f"of {total:,} images {'; '.join(said)}",) if said else ()


def _each(
    encoded: Iterable[Encoded], function: Callable[[Encoded], Result]
) -> Iterator[tuple[list[Encoded], list[Result]]]:
    """Parts of the images in their order, with a function of each image, which is computed in threads."""
    workers = min(32, os.cpu_count() or 1)
    waiting: deque[tuple[list[Encoded], Future[list[Result]]]] = deque()

    def finished() -> tuple[list[Encoded], list[Result]]:
        check_stop()
        part, future = waiting.popleft()
        return part, future.result()

    with ThreadPoolExecutor(workers, "decode") as pool:
        try:
            for part in _parts(encoded):
                waiting.append((part, pool.submit(lambda own: [function(one) for one in own], part)))
                if len(waiting) > 2 * workers:
                    yield finished()
            while waiting:
                yield finished()
        finally:
            pool.shutdown(cancel_futures=True)


def _parts(encoded: Iterable[Encoded]) -> Iterator[list[Encoded]]:
    part: list[Encoded] = []
    size = 0
    for one in encoded:
        part.append(one)
        size += len(one.content or b"")
        if len(part) == PART or size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _decode_one(one: Encoded, form: ImageSettings | None, hashed: bool) -> _Read | _Unreadable:
    try:
        with one.open() as image:
            formed = to_form(image)
    except MemoryError:
        raise
    except PermissionError:
        return _Unreadable(f"a file {DENIED}", DENIED)
    except TooDeepError:
        return _Unreadable(f"an image {DEEPER}", DEEPER)
    except Image.DecompressionBombError:
        return _Unreadable(f"an image {VAST}", VAST)
    except Exception:  # decoders raise errors of all kinds for damaged files
        return _Unreadable(f"a file {DAMAGED}", DAMAGED)
    pixels = formed.pixels
    try:
        fitted = pixels if form is None else fit_pixels(pixels[None], form)[0]
    except TooLargeError as error:
        return _Unreadable(str(error), f"is {describe(pixels.shape)}; {error}")
    return _Read(fitted, pixels.shape, formed.changes, formed.origins, digest_of(pixels) if hashed else b"")


def _shape_of_one(one: Encoded) -> tuple[int, ...] | None:
    try:
        with one.open() as image:
            return shape_of(image)
    except MemoryError:
        raise
    except Exception:  # as above
        return None
