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
    # an array of the names would hold each in as much memory as the longest takes
    seen: dict[str, int] = {}
    found = np.fromiter((seen.setdefault(_normal(name), len(seen)) for name in names), np.int64)
    number = np.empty(len(seen), np.int64)
    number[[seen[name] for name in sorted(seen)]] = np.arange(len(seen))
    return number[found]


def _normal(name: str) -> str:
    """A name as it is compared. NULs at its end, which pad names in files and in arrays of NumPy, do not count."""
    return unicodedata.normalize("NFC", name).rstrip("\0")


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
