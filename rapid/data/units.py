"""The unit of the guarantee: one image, or one person with all their images."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ONE_IMAGE, ONE_PERSON = "one image", "one person"


@dataclass(frozen=True)
class PeopleFrom:
    """Where a private set says whose image each is.

    Attributes:
        column: array of an `.npz`, strings or integers (N,); None: the name of the innermost folder, in
            `class/person/*.png` for labelled sets and `person/*.png` for unlabelled ones.
    """

    column: str | None = None


def plural(unit: str) -> str:
    """What is counted: "people" or "images"."""
    return "people" if unit == ONE_PERSON else "images"


def numbered(names: Iterable[str]) -> NDArray[np.int64]:
    """Number people by their names, from 0; int64 (N,) for N images. Names that look alike are the same person.

    The numbers are those of the sorted names. They stay in the process, like the names.
    """
    same = np.array([unicodedata.normalize("NFC", name) for name in names], dtype=np.str_)
    return np.unique(same, return_inverse=True)[1].reshape(-1).astype(np.int64)


def people_digests(images: NDArray[np.uint8], units: NDArray[np.int64]) -> list[bytes]:
    """sha256 of the images of each person, sorted: neither the order of images nor the numbers of people matter.

    Args:
        images: digests, or others of one size that stand for images, uint8 (N, bytes).
        units: number of the person that each image shows, int64 (N,).
    """
    of_person: dict[int, list[bytes]] = {}
    for image, unit in zip(map(bytes, images), units.tolist(), strict=True):
        of_person.setdefault(unit, []).append(image)
    return sorted(hashlib.sha256(b"".join(sorted(group))).digest() for group in of_person.values())
