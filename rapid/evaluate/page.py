"""The HTML page of a report: one self-contained file with embedded pictures; the template escapes all names."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from rapid.evaluate.networks import PROTOCOL
from rapid.pictures import Pixels, encode_png
from rapid.rounding import rounded_up

MATRIX_CLASSES = 26
"""Confusion matrices with more classes are only in the JSON file."""


def render(content: Mapping[str, Any], samples: Mapping[str, Pixels], closest: Pixels) -> str:
    """Render the page.

    Args:
        content: of the report, as in the JSON file.
        samples: pictures of samples by caption, uint8 (H, W) or (H, W, 3).
        closest: picture of the closest pairs.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: "-" if value is None else f"{value:.2%}"
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["number"] = lambda value: "-" if value is None else f"{value:.3g}"
    environment.filters["up"] = rounded_up
    template = environment.from_string(resources.files("rapid.evaluate").joinpath("page.html").read_text("utf-8"))
    return template.render(
        **content,
        samples={caption: _data_uri(picture) for caption, picture in samples.items()},
        closest=_data_uri(closest),
        matrix=_confusion(content["utility"]),
        largest_error=_largest_error(content["utility"]),
    )


def _confusion(utility: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The confusion matrix of one network trained on the synthetic images, rows normalised; None if it is too large."""
    if utility is None:
        return None
    found = utility["synthetic"]
    if max(len(found["classes"]), len(found["test_classes"])) > MATRIX_CLASSES:
        return None
    name = next((name for name in PROTOCOL if name in found["networks"]), next(iter(found["networks"])))
    network = found["networks"][name]
    rows = [
        (label, [(count, count / max(1, sum(counts))) for count in counts])
        for label, counts in zip(found["test_classes"], network["confusion"], strict=True)
    ]
    return {"network": network["network"], "columns": found["classes"], "rows": rows}


def _largest_error(utility: Mapping[str, Any] | None) -> float:
    """The largest error rate of all networks, which scales the bars; never 0."""
    sets = [] if utility is None else [found for found in utility.values() if isinstance(found, dict)]
    return max((1 - network["accuracy"] for found in sets for network in found["networks"].values()), default=0) or 1.0


def _data_uri(picture: Pixels) -> str:
    return f"data:image/png;base64,{base64.b64encode(encode_png(picture)).decode('ascii')}"
