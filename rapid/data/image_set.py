"""A set of labelled or unlabelled images of one size, and joining several."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid.data.origin import Origin, union
from rapid.data.stored import Stored
from rapid.errors import InputError
from rapid.mapped import blocks, joined


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    Attributes:
        images: uint8, (N, H, W) grey or (N, H, W, 3) RGB; mapped from a file if they are large, and not to be changed.
        labels: int64, (N,), indices into `classes`; None if the images are unlabelled.
        classes: class names; empty if the images are unlabelled.
        source: where the images come from, for messages.
        declared: whether the class names were given, not taken from the labels.
        units: int64, (N,), the number of the person that each image shows, 0..people-1, each at least once; None if
            every image is a unit of its own.
        notes: what was done to the images when they were read, such as "of 9 images 3 with transparency, now on black";
            always empty for private images.
        origins: the private models that made some of the images, as far as these say so; always empty for private
            images.
        stored: what the images were before they were brought to one form; None if they have not been read from a path.
        digests: sha256 of each image as it is stored, uint8 (N, 32), if it was asked for. Never store those of private
            images.
        soft_labels: probabilities of the classes, float32 (N, classes), if they were asked for.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    source: str = ""
    declared: bool = True
    units: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = ()
    stored: Stored | None = None
    digests: NDArray[np.uint8] | None = None
    soft_labels: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for RGB."""
        return 1 if self.images.ndim == 3 else 3

    @property
    def unit_count(self) -> int:
        """Number of people if the unit is a person, else of images."""
        return len(self) if self.units is None else int(self.units.max()) + 1

    def fingerprint(self) -> str:
        """sha256 (hex) of pixels, labels, classes and units, to detect changes. Never store that of private images."""
        digest = hashlib.sha256(repr((self.images.shape, self.classes)).encode())
        for block in blocks(self.images):
            digest.update(np.ascontiguousarray(block).data)
        if self.labels is not None:
            digest.update(np.ascontiguousarray(self.labels).data)
        if self.units is not None:
            digest.update(b"units" + self.units.tobytes())
        return digest.hexdigest()


def join(sets: Sequence[ImageSet], field: str) -> ImageSet:
    """Concatenate image sets of one size. Classes of different sets stay apart.

    If two sets share a class name, all names are prefixed with the name of their set.

    Args:
        sets: at least one.
        field: name of the argument that gave the paths; for messages.

    Raises:
        InputError: the sets differ in size or channels, or only some are labelled.
    """
    if len(sets) == 1:
        return sets[0]
    shapes = {s.images.shape[1:] for s in sets}
    if len(shapes) > 1:
        raise InputError(field, f"the sets differ in size or channels: {sorted(shapes)}; convert them first")
    source = ", ".join(s.source for s in sets)
    origins = union(*(s.origins for s in sets))
    labelled = [s for s in sets if s.labels is not None]
    if labelled and len(labelled) < len(sets):
        raise InputError(field, "some sets are labelled and some are not; label all of them or none")
    images = joined([s.images for s in sets])
    if not labelled:
        return ImageSet(images, None, (), source, origins=origins)
    names = [name for s in sets for name in s.classes]
    if len(set(names)) < len(names):
        stems = [Path(s.source).stem for s in sets]
        if len(set(stems)) < len(stems):
            stems = [f"{stem}-{number}" for number, stem in enumerate(stems, 1)]
        names = [f"{stem}/{name}" for stem, s in zip(stems, sets, strict=True) for name in s.classes]
    offsets = np.cumsum([0, *(len(s.classes) for s in sets[:-1])])
    labels = np.concatenate(
        [s.labels + offset for s, offset in zip(sets, offsets, strict=True) if s.labels is not None]
    )
    return ImageSet(images, labels, tuple(names), source, origins=origins)
