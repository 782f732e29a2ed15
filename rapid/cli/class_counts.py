"""The argument `--class-counts`: how many images of each class."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rapid.errors import DENIED, InputError
from rapid.parsing import parse_json
from rapid.sampling.generate import MAX_COUNT, MAX_DIGITS, resolve_labels

FIELD = "class_counts"
FORMS = 'give 7=500,cat=200, or a .json file {"7": 500}, or a .csv file with the lines class,count'


def read_class_counts(value: str, classes: Sequence[str]) -> list[int]:
    """The class index of each image, class by class in the given order.

    Args:
        value: pairs NAME=COUNT separated by commas, or the path of a JSON object or of a CSV file with two columns and,
            if wanted, a header. Classes by name or number.
        classes: names of the model's classes.

    Raises:
        InputError: no such file, a malformed entry, an unknown class, a class twice, no images at all, or
            more than a request can have.
    """
    if not classes:
        raise InputError(FIELD, "the model has no classes; give --count", value)
    labels: list[int] = []
    seen: set[int] = set()
    for name, count in _entries(value):
        if not name:
            raise InputError(FIELD, f"has a number without a class; {FORMS}", value)
        text = str(count).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise InputError(FIELD, f"'{name}' needs a whole number of images, not '{text}'; {FORMS}", value)
        try:
            (label,) = resolve_labels(classes, [name])
        except InputError as error:
            raise InputError(FIELD, f"'{name}' is {error.problem}", value) from None
        if label in seen:
            raise InputError(FIELD, f"names class '{classes[label]}' twice; add the two numbers", value)
        seen.add(label)
        if len(labels) + int(text) > MAX_COUNT:
            raise InputError(FIELD, f"asks for more than {MAX_COUNT:,} images; make the rest with other seeds", value)
        labels += [label] * int(text)
    if not labels:
        raise InputError(FIELD, f"asks for no images; {FORMS}", value)
    return labels


def _entries(value: str) -> list[tuple[str, Any]]:
    """Names and counts as they are written."""
    path = Path(value)
    # unlike Path.is_file, it takes a name that no file can have
    if "=" in value and not os.path.isfile(value):  # noqa: PTH113
        pairs = [pair if "=" in pair else f"{pair}=" for pair in value.split(",") if pair.strip()]
        return [(name.strip(), count) for name, _, count in (pair.rpartition("=") for pair in pairs)]
    try:
        content = path.read_text(encoding="utf-8-sig")
    except PermissionError:
        raise InputError(FIELD, DENIED, value) from None
    except (OSError, ValueError):
        raise InputError(FIELD, f"is no file that can be read; {FORMS}", value) from None
    return _json_entries(content, value) if path.suffix.lower() == ".json" else _csv_entries(content, value)


def _json_entries(content: str, value: str) -> list[tuple[str, Any]]:
    try:
        # as pairs: a dict would hide a class that stands there twice
        pairs = parse_json(content, object_pairs_hook=list)
    except ValueError:
        raise InputError(FIELD, f"is not JSON; {FORMS}", value) from None
    if not content.lstrip().startswith("{"):
        raise InputError(FIELD, f"is not a JSON object; {FORMS}", value)
    return [(name, count) for name, count in pairs]


def _csv_entries(content: str, value: str) -> list[tuple[str, Any]]:
    try:
        rows = [row for row in csv.reader(content.splitlines()) if any(cell.strip() for cell in row)]
    except csv.Error:
        raise InputError(FIELD, f"is not CSV; {FORMS}", value) from None
    if any(len(row) != 2 for row in rows):
        raise InputError(FIELD, f"has a line without two columns; {FORMS}", value)
    entries = [(name.strip(), count) for name, count in rows]
    header = [name.lower() for name in rows[0]] if rows else []
    return entries[1:] if header in (["class", "count"], ["label", "count"], ["class_name", "count"]) else entries
