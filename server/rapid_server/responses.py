"""Images as an HTTP answer: JSON with base64 PNGs, one PNG or a zip, and the same as streams while they are made.

What is collected is a function of the images alone, so the same images give the same bytes; so does a zip, whose files
come in order.
"""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
from starlette.responses import Response

from rapid.errors import RapidError
from rapid.pictures import Pixels, encode_png, grid
from rapid_server.catalogue import Model
from rapid_server.engine import EngineStoppedError, Job
from rapid_server.failures import FAILED, STOPPING
from rapid_server.line import Made

JSON = "application/json"
PNG = "image/png"
ZIP = "application/zip"
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def headers(model: Model, job: Job) -> dict[str, str]:
    """What the images are, in the head of every answer that has some."""
    found = {"X-Rapid-Model": quote(model.name), "X-Rapid-Seed": str(job.order.seed), "Vary": "Accept"}
    found |= {"X-Rapid-Synthetic": "true", "X-Rapid-Sha256": model.sha256}
    for key in ("epsilon", "delta"):
        if model.privacy is not None and key in model.privacy:
            found[f"X-Rapid-{key.title()}"] = str(model.privacy[key])
    return found


def class_names(model: Model, job: Job) -> list[str | None]:
    """The class of each image; None for a model without classes."""
    labels = job.order.labels
    return [None] * job.order.count if labels is None else [model.classes[label] for label in labels]


def png(model: Model, image: Pixels) -> bytes:
    """One image with its provenance."""
    return encode_png(image, model.chunks)


def base64_png(model: Model, image: Pixels) -> str:
    """The same as text."""
    return base64.b64encode(png(model, image)).decode("ascii")


def as_json(model: Model, job: Job, made: list[Made]) -> Response:
    """Everything in one JSON object; see `schemas.GenerateResponse`."""
    content: dict[str, Any] = {
        "images": [base64_png(model, one.image) for one in made],
        "labels": class_names(model, job),
        "entries": [_entry(one) for one in made],
        "seed": job.order.seed,
        "model": model.name,
        "privacy": model.privacy,
    }
    return Response(json.dumps(content), media_type=JSON, headers=headers(model, job))


def as_png(model: Model, job: Job, made: list[Made]) -> Response:
    """One PNG: the image, or a grid of the images if they are several."""
    image = made[0].image if len(made) == 1 else grid(np.stack([one.image for one in made]))
    return Response(png(model, image), media_type=PNG, headers=headers(model, job))


async def as_lines(model: Model, job: Job) -> AsyncIterator[bytes]:
    """One JSON object a line: what is to come, each image when it is done, the end."""
    async for _, content in _told(model, job):
        yield json.dumps(content).encode() + b"\n"


async def as_events(model: Model, job: Job) -> AsyncIterator[bytes]:
    """The same as server-sent events, named by their `type`."""
    async for name, content in _told(model, job):
        yield f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()


async def as_zip(model: Model, job: Job) -> AsyncIterator[bytes]:
    """A zip of PNGs in order, named by their place and class: `00000-a.png`, ..."""
    names = class_names(model, job)
    pipe = _Pipe()
    # streamed: zipfile asks for no place to return to
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        async for one in _in_order(job):
            name = names[one.place]
            stem = f"{one.place:05d}" if name is None else f"{one.place:05d}-{file_name(name)}"
            archive.writestr(zipfile.ZipInfo(f"{stem}.png", _ZIP_DATE), png(model, one.image))
            yield pipe.take()
    yield pipe.take()


def zip_name(model: Model, job: Job) -> str:
    """The name that a browser gives the file."""
    return f"{file_name(model.name)}-{job.order.seed}.zip"


def file_name(name: str) -> str:
    """Make `name` safe as a part of a file name everywhere."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:60] or "_"


async def _told(model: Model, job: Job) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The parts of a stream, each with its type."""
    names, done = class_names(model, job), 0
    start = {"seed": job.order.seed, "count": job.order.count, "model": model.name, "privacy": model.privacy}
    yield "start", {"type": "start"} | start
    try:
        async for batch in job:
            for one in batch:
                done += 1
                image = {"type": "image", "index": one.place, "label": names[one.place], "entry": _entry(one)}
                yield "image", image | {"done": done, "count": job.order.count, "image": base64_png(model, one.image)}
                job.taken = done
    except RapidError as error:
        # the status was sent long ago
        detail = STOPPING if isinstance(error, EngineStoppedError) else FAILED
        yield "error", {"type": "error", "detail": detail}
        return
    yield "end", {"type": "end", "count": done}


def _entry(one: Made) -> int | None:
    return one.entry if one.entry >= 0 else None


async def _in_order(job: Job) -> AsyncIterator[Made]:
    """Images in the order of their places."""
    early: dict[int, Made] = {}
    following = 0
    async for batch in job:
        early |= {one.place: one for one in batch}
        for one in _take(early, following):
            following += 1
            yield one
            job.taken = following


def _take(early: dict[int, Made], following: int) -> Iterator[Made]:
    while (one := early.pop(following, None)) is not None:
        following += 1
        yield one


class _Pipe:
    """A file that can be written to, and emptied."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()

    def write(self, content: bytes, /) -> int:
        """Put `content` behind what is there."""
        return self._buffer.write(content)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is left open."""

    def take(self) -> bytes:
        """All that was written since the last time."""
        content = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        return content
