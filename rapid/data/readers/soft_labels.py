"""Soft labels as they are written, turned into probabilities of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rapid.data.readers.source import Labels, Source

COLUMN = "soft_labels"
"""Name of the array or column."""
TOLERANCE = 1e-3
"""How far the probabilities of an image may be from adding up to 1: they are rounded."""
WRONG = f"'{COLUMN}' must hold one probability for each class, which add up to 1, for each image; correct them"


def read_soft_labels(values: ArrayLike, labels: Labels | None, source: Source) -> NDArray[np.float32]:
    """Check soft labels whose order is that of the classes.

    Args:
        values: a row for each image.
        labels: the labels of the same images.
        source: for messages.

    Returns:
        Probabilities, float32 (N, classes).

    Raises:
        InputError: the images have no labels, or these are no probabilities of their classes.
    """
    if labels is None:
        raise source.error(f"has '{COLUMN}' but no labels; add them")
    try:
        rows = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        raise source.error(WRONG) from None
    if rows.shape != (len(labels.numbers), len(labels.names)) or not (rows >= 0).all():
        raise source.error(WRONG)
    # of NaN and infinity, too
    if not (np.abs(rows.sum(1, dtype=np.float64) - 1) <= TOLERANCE).all():
        raise source.error(WRONG)
    return rows


def from_objects(rows: Sequence[Any], labels: Sequence[Any], source: Source) -> tuple[tuple[str, ...], list[list[Any]]]:
    """The classes of soft labels that are written as objects, in their order, and the values of each row.

    Args:
        rows: an object with a probability for each class, for each image.
        labels: names of the classes of the same images.
        source: for messages.

    Raises:
        InputError: they are no such objects, name different classes, or not those of the labels.
    """
    if not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        raise source.error(WRONG)
    classes = tuple(rows[0])
    if not all(label in classes for label in labels):
        raise source.error(WRONG)
    return classes, [[row[name] for name in classes] for row in rows]
