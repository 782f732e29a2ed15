"""Soft labels as they are written, turned into probabilities of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rapid.data.readers.source import Labels, Source
from rapid.metadata import SOFT_LABELS

TOLERANCE = 1e-3
"""How far the probabilities of an image may be from adding up to 1: they are rounded."""
WRONG = f"'{SOFT_LABELS}' must hold one probability for each class, which add up to 1, for each image; correct them"
NO_ORDER = f"has '{SOFT_LABELS}', and labels that are names without an order; write a ClassLabel, or numbers"


class ByName(NamedTuple):
    """The soft labels of an image that are written as an object."""

    classes: tuple[str, ...]
    chances: NDArray[np.float32]
    """(classes,)."""


def by_name(written: Any, known: dict[tuple[str, ...], tuple[str, ...]]) -> ByName | None:
    """An object with a probability for each class, in little memory; None for anything else.

    Args:
        written: of an image.
        known: the classes of earlier images, which are not held again.
    """
    if not isinstance(written, dict) or not all(type(chance) in (int, float) for chance in written.values()):
        return None
    classes = tuple(written)
    try:
        chances = np.array(list(written.values()), np.float64)
    except OverflowError:
        return None
    with np.errstate(over="ignore"):
        return ByName(known.setdefault(classes, classes), chances.astype(np.float32))


def join_by_name(
    rows: Sequence[Any], labels: Sequence[Any], source: Source
) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """The classes of soft labels that are written as objects, in the order of the first, and all rows, (N, classes).

    Args:
        rows: of each image a `ByName`, or anything else where it has none; N >= 1.
        labels: names of the classes of the same images.
        source: for messages.

    Raises:
        InputError: some are no such objects, or name different classes, or not those of the labels.
    """
    classes = rows[0].classes if isinstance(rows[0], ByName) else ()
    place = {one: number for number, one in enumerate(classes)}
    if not all(isinstance(label, str) and label in place for label in labels):
        raise source.error(WRONG)
    found = np.empty((len(rows), len(classes)), np.float32)
    for number, row in enumerate(rows):
        if not isinstance(row, ByName) or place.keys() != set(row.classes):
            raise source.error(WRONG)
        found[number, [place[one] for one in row.classes]] = row.chances
    return classes, found


def as_rows(written: ArrayLike, source: Source) -> NDArray[np.float32]:
    """Some rows as they are written, float32 (n, classes).

    Raises:
        InputError: they are no real numbers, or of different lengths.
    """
    try:
        found = np.asarray(written)
    except ValueError:
        raise source.error(WRONG) from None
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        raise source.error(WRONG)
    # beyond float32 they are no probabilities, which is checked later
    with np.errstate(over="ignore"):
        return found.astype(np.float32, copy=False)


def read_soft_labels(
    parts: Sequence[NDArray[np.float32]], labels: Labels | None, source: Source
) -> NDArray[np.float32]:
    """Check soft labels whose order is that of the classes.

    Args:
        parts: see `as_rows`; together a row for each image.
        labels: the labels of the same images.
        source: for messages.

    Returns:
        Probabilities, float32 (N, classes).

    Raises:
        InputError: the images have no labels, or these are no probabilities of their classes.
    """
    if labels is None:
        raise source.error(f"has '{SOFT_LABELS}' but no labels; add them")
    if any(part.shape[1] != len(labels.names) for part in parts) or sum(map(len, parts)) != len(labels.numbers):
        raise source.error(WRONG)
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    # the sum is no number where one of them is none
    if not (rows >= 0).all() or not (np.abs(rows.sum(1, dtype=np.float64) - 1) <= TOLERANCE).all():
        raise source.error(WRONG)
    return rows
