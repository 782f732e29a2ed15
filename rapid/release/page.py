"""The page of a report for people: one self-contained HTML file; the template escapes all names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from rapid.bundle.card import privacy_in_words
from rapid.rounding import percent_down, percent_up, rounded_down, rounded_up

WORDS = {"pass": "yes", "fail": "no", "not measured": "not measured"}


def render(content: Mapping[str, Any]) -> str:
    """Render the page.

    Args:
        content: of the report, as in the JSON file but for the page's hash.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["percent_up"] = percent_up
    environment.filters["percent_down"] = percent_down
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["up"] = lambda value: "no number" if value is None else rounded_up(value, 4)
    environment.filters["down"] = lambda value: rounded_down(value, 4)
    environment.filters["holds"] = WORDS.__getitem__
    template = environment.from_string(resources.files("rapid.release").joinpath("page.html").read_text("utf-8"))
    return template.render(**content, words=privacy_in_words(dict(content["privacy"]["statement"])))
