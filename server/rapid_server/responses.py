"""Images as an HTTP response: JSON with base64 PNGs, one PNG or a zip, or streamed while they are made.

Equal images give equal bytes, in a collected response and in a zip, whose files are in order.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import zipfile
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from rapid.errors import RapidError
from rapid.metadata import METADATA, metadata_line
from rapid.pictures import Pixels, encode_png, grid
from rapid_server.encoder import Encoder
from rapid_server.engine import EngineStoppedError
from rapid_server.job import Job
from rapid_server.models import Model
from rapid_server.problems import FAILED, STOPPING
from rapid_server.worker import ImageDone

JSON = "application/json"
PNG = "image/png"
ZIP = "application/zip"
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"

METADATA_ROWS = 16
"""Images whose lines are written at a time."""
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Reply:
    """What a response with images is made of.

    Attributes:
        encoder: makes the PNGs.
        model: which makes the images.
        job: gives them.
        soft_labels: whether the probabilities of the classes are told with each image.
    """

    encoder: Encoder
    model: Model
    job: Job
    soft_labels: bool = False


def headers(model: Model, job: Job) -> dict[str, str]:
    """Headers of every response with images: model, seed, provenance and privacy."""
    found = model_headers(model) | {"X-Rapid-Seed": str(job.request.seed), "Vary": "Accept"}
    return found | {"X-Rapid-Synthetic": "true"}


def model_headers(model: Model) -> dict[str, str]:
    """Headers of every response by a model: its name, its digest and its privacy."""
    found = {"X-Rapid-Model": quote(model.name), "X-Rapid-Sha256": model.sha256}
    for key in ("epsilon", "delta"):
        if model.privacy is not None and key in model.privacy:
            found[f"X-Rapid-{key.title()}"] = str(model.privacy[key])
    return found


def class_names(model: Model, job: Job) -> list[str | None]:
    """The class of each image; None for a model without classes."""
    labels = job.request.labels
    return [None] * job.request.count if labels is None else [model.classes[label] for label in labels]


def png(model: Model, image: Pixels) -> bytes:
    """PNG of an image, with its provenance in text chunks."""
    return encode_png(image, model.provenance)


def base64_png(model: Model, image: Pixels) -> str:
    """The same in base64."""
    return base64.b64encode(png(model, image)).decode("ascii")


async def base64_pngs(encoder: Encoder, model: Model, images: list[ImageDone]) -> list[str]:
    """The same of many images, in their order."""
    return await encoder.map(partial(base64_png, model), [one.image for one in images])


async def as_json(reply: Reply, images: list[ImageDone]) -> Response:
    """One JSON object; see `schemas.GenerateResponse`."""
    contents = await base64_pngs(reply.encoder, reply.model, images)
    # also off the event loop: of thousands of images it is megabytes
    return await asyncio.to_thread(_json_response, reply, images, contents)


def _json_response(reply: Reply, images: list[ImageDone], contents: list[str]) -> Response:
    model, job = reply.model, reply.job
    content: dict[str, Any] = {
        "images": contents,
        "labels": class_names(model, job),
        "entries": [_record(one) for one in images],
        "seed": job.request.seed,
        "model": model.name,
        "privacy": model.privacy,
    }
    if reply.soft_labels:
        text = json_with_rows(content, "soft_labels", map(_soft_label, images))
    else:
        text = json_text(content | {"soft_labels": None})
    return Response(text, media_type=JSON, headers=headers(model, job))


async def as_png(reply: Reply, images: list[ImageDone]) -> Response:
    """One PNG: the image, or a grid of several images."""
    sheet = images[0].image
    if len(images) > 1:
        sheet = await asyncio.to_thread(lambda: grid(np.stack([one.image for one in images])))
    (content,) = await reply.encoder.map(partial(png, reply.model), [sheet])
    return Response(content, media_type=PNG, headers=headers(reply.model, reply.job))


async def as_lines(reply: Reply) -> AsyncIterator[bytes]:
    """One JSON object per line: the start, each image when it is finished, the end."""
    async for _, content in _events(reply):
        yield json_text(content).encode() + b"\n"


async def as_events(reply: Reply) -> AsyncIterator[bytes]:
    """The same as server-sent events, named by their `type`."""
    async for name, content in _events(reply):
        yield f"event: {name}\ndata: {json_text(content)}\n\n".encode()


async def as_zip(reply: Reply) -> AsyncIterator[bytes]:
    """A zip of PNGs in order, named by place and class: `00000-a.png`, ...

    With soft labels `metadata.jsonl` comes last, and what is unpacked is an image set with them.
    """
    model, job = reply.model, reply.job
    names = class_names(model, job)
    pipe, described = _Pipe(), list[tuple[str, str, Probabilities]]()
    # a file without `seek`: zipfile then writes a stream
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        async for ready in _in_order(job):
            contents = await reply.encoder.map(partial(png, model), [one.image for one in ready])
            for one, content in zip(ready, contents, strict=True):
                name = names[one.place]
                stem = f"{one.place:05d}" if name is None else f"{one.place:05d}-{file_name(name)}"
                archive.writestr(zipfile.ZipInfo(f"{stem}.png", _ZIP_DATE), content)
                if reply.soft_labels:
                    assert name is not None and one.probabilities is not None
                    described.append((f"{stem}.png", name, one.probabilities))
                yield pipe.take()
                job.sent = one.place + 1
        if described:
            # text of a thousand classes takes long and is large: made in another thread, and sent in parts
            parts = [described[at : at + METADATA_ROWS] for at in range(0, len(described), METADATA_ROWS)]
            text = await asyncio.to_thread(_metadata, model, parts[0])
            info = zipfile.ZipInfo(METADATA, _ZIP_DATE)
            # more than it will be: by this zipfile decides whether the format for large files is needed
            info.file_size = 2 * len(text) * len(parts)
            with archive.open(info, "w") as file:
                file.write(text)
                for part in parts[1:]:
                    yield pipe.take()
                    file.write(await asyncio.to_thread(_metadata, model, part))
    yield pipe.take()


def _metadata(model: Model, described: list[tuple[str, str, Probabilities]]) -> bytes:
    """Lines for images, of each its file, class and soft label."""
    return "".join(metadata_line(file, name, model.classes, chances) for file, name, chances in described).encode()


def zip_name(model: Model, job: Job) -> str:
    """File name of the zip."""
    return f"{file_name(model.name)}-{job.request.seed}.zip"


def file_name(name: str) -> str:
    """Make `name` safe as part of a file name on any system."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:60] or "_"


async def _events(reply: Reply) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The objects of a stream, each with its type."""
    model, job = reply.model, reply.job
    names, done, count = class_names(model, job), 0, job.request.count
    start = {"seed": job.request.seed, "count": count, "model": model.name, "privacy": model.privacy}
    yield "start", {"type": "start"} | start
    try:
        async for batch in job:
            contents = await base64_pngs(reply.encoder, model, batch)
            for one, content in zip(batch, contents, strict=True):
                done += 1
                image = {"type": "image", "index": one.place, "label": names[one.place], "entry": _record(one)}
                if reply.soft_labels:
                    image["soft_label"] = _soft_label(one)
                yield "image", image | {"done": done, "count": count, "image": content}
                job.sent = done
    except RapidError as error:
        # too late for another status
        detail = STOPPING if isinstance(error, EngineStoppedError) else FAILED
        yield "error", {"type": "error", "detail": detail}
        return
    yield "end", {"type": "end", "count": done}


def json_text(content: dict[str, Any]) -> str:
    """JSON; a ValueError where a number is not finite, which JSON does not know."""
    return json.dumps(content, allow_nan=False)


def json_with_rows(content: dict[str, Any], name: str, rows: Iterable[list[float]]) -> str:
    """JSON of `content` and, last, of `rows` under `name`.

    Each row is encoded by itself, because other threads wait while a value is encoded: with a thousand classes, that
    of all rows takes seconds.
    """
    texts = [json.dumps(row, allow_nan=False) for row in rows]
    return f"{json_text(content)[:-1]}, {json.dumps(name)}: [{', '.join(texts)}]}}"


def _record(one: ImageDone) -> int | None:
    return one.record if one.record >= 0 else None


def _soft_label(one: ImageDone) -> list[float]:
    assert one.probabilities is not None
    # the shortest text of the same float32
    return [float(str(chance)) for chance in one.probabilities]


async def _in_order(job: Job) -> AsyncIterator[list[ImageDone]]:
    """Images in the order of their places, those together that are ready together."""
    pending: dict[int, ImageDone] = {}
    following = 0
    async for batch in job:
        pending |= {one.place: one for one in batch}
        ready = list(_pop_in_order(pending, following))
        following += len(ready)
        if ready:
            yield ready


def _pop_in_order(pending: dict[int, ImageDone], following: int) -> Iterator[ImageDone]:
    while (one := pending.pop(following, None)) is not None:
        following += 1
        yield one


class _Pipe:
    """A file object whose content can be taken out while it is written."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()

    def write(self, content: bytes, /) -> int:
        """Append `content`."""
        return self._buffer.write(content)

    def flush(self) -> None:
        """Do nothing: there is no buffer behind this one."""

    def close(self) -> None:
        """Do nothing: there is no file behind this object."""

    def take(self) -> bytes:
        """Return and remove what was written since the last call."""
        content = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        return content
