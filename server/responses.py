"""Samples as an HTTP answer: JSON with base64 PNGs, one PNG, or a zip of PNGs.

Each is a function of the samples alone, so the same samples give the same bytes.
"""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import Response

from rapid.pictures import encode_png, grid

if TYPE_CHECKING:
    from rapid.generate import Generator, Samples

JSON = "application/json"
PNG = "image/png"
ZIP = "application/zip"

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def render(media_type: str, generator: Generator, samples: Samples) -> Response:
    """Make the answer of the given type (a key of `RENDERERS`), with what the images are also in its headers."""
    names = class_names(generator.classes, samples)
    response = RENDERERS[media_type](generator, samples, names)
    response.headers["X-Rapid-Model"] = quote(generator.name)
    response.headers["X-Rapid-Seed"] = str(samples.seed)
    for key in ("epsilon", "delta"):
        if generator.privacy is not None and key in generator.privacy:
            response.headers[f"X-Rapid-{key.title()}"] = str(generator.privacy[key])
    response.headers["Vary"] = "Accept"
    return response


def class_names(classes: Sequence[str], samples: Samples) -> list[str | None]:
    """Name the class of each image; None for a model without classes."""
    if samples.labels is None:
        return [None] * len(samples.images)
    return [classes[label] for label in samples.labels]


def as_json(generator: Generator, samples: Samples, names: Sequence[str | None]) -> Response:
    """Everything in one JSON object; see `schemas.GenerateResponse`."""
    content: dict[str, Any] = {
        "images": [base64.b64encode(encode_png(image)).decode("ascii") for image in samples.images],
        "labels": list(names),
        "seed": samples.seed,
        "model": generator.name,
        "privacy": generator.privacy,
    }
    return Response(json.dumps(content), media_type=JSON)


def as_png(generator: Generator, samples: Samples, names: Sequence[str | None]) -> Response:
    """One PNG: the image, or a grid of the images if they are several."""
    image = samples.images[0] if len(samples.images) == 1 else grid(samples.images)
    return Response(encode_png(image), media_type=PNG)


def as_zip(generator: Generator, samples: Samples, names: Sequence[str | None]) -> Response:
    """Zip the images, named by their place and class: `00000-a.png`, ..."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_STORED) as archive:
        for place, (image, name) in enumerate(zip(samples.images, names, strict=True)):
            stem = f"{place:05d}" if name is None else f"{place:05d}-{file_name(name)}"
            archive.writestr(zipfile.ZipInfo(f"{stem}.png", _ZIP_DATE), encode_png(image))
    stem = f"{file_name(generator.name)}-{samples.seed}"
    return Response(
        memory.getvalue(),
        media_type=ZIP,
        headers={"Content-Disposition": f'attachment; filename="{stem}.zip"'},
    )


def file_name(name: str) -> str:
    """Make `name` safe as a part of a file name everywhere."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:60] or "_"


RENDERERS: dict[str, Callable[[Generator, Samples, Sequence[str | None]], Response]] = {
    JSON: as_json,
    PNG: as_png,
    ZIP: as_zip,
}
