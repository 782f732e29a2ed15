"""JSON and YAML that users write: whatever is wrong with them is one kind of error."""

from __future__ import annotations

import json
from typing import Any

import yaml

DEEP = "is nested too deeply"


def parse_json(text: str | bytes, **options: Any) -> Any:
    """What a JSON text says.

    Args:
        text: the JSON.
        options: of `json.loads`.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError(DEEP) from None


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """What a YAML text says.

    Args:
        text: the YAML; JSON is YAML, too.
        loader: a safe one.

    Raises:
        yaml.YAMLError: it is not YAML, nested too deeply, or has a date or a number that there is not.
    """
    try:
        return yaml.load(text, Loader=loader)
    except RecursionError:
        raise yaml.YAMLError(DEEP) from None
    except ValueError:
        # of dates such as 2026-13-45, and of thousands of digits
        raise yaml.YAMLError("a value is out of range") from None
