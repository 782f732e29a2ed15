"""What the images of a set were before they were brought to one form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rapid.config.sections import ImageSettings
from rapid.mapped import blocks

DIGEST = 32
"""Bytes of a digest."""
Size = tuple[int, int]
"""Width and height of an upright image."""


class Stored(NamedTuple):
    """Sizes and colours of images as they are stored. Nothing of it may be told of private images."""

    smallest: Size
    """Of the image with the fewest pixels."""
    largest: Size
    """Of the one with the most."""
    side: int
    """The longest side of all."""
    mixed: bool
    """Whether they differ in size or colour mode."""
    channels: Literal[1, 3]
    """3 if any is in colour."""

    @classmethod
    def alike(cls, images: NDArray[np.uint8]) -> Stored:
        """Of images of one size, uint8 (N, H, W) or (N, H, W, 3)."""
        height, width = images.shape[1:3]
        return cls((width, height), (width, height), max(height, width), False, 1 if images.ndim == 3 else 3)

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, ...]]) -> Stored:
        """Of images of these different shapes, (H, W) or (H, W, 3); at least one."""
        kinds = set(shapes)
        sizes = sorted({(shape[1], shape[0]) for shape in kinds}, key=lambda size: (size[0] * size[1], size))
        side = max(max(size) for size in sizes)
        return cls(sizes[0], sizes[-1], side, len(kinds) > 1, 3 if any(len(shape) == 3 for shape in kinds) else 1)

    @property
    def sizes(self) -> str:
        """Such as "37x50 to 4032x3024"."""
        ends = dict.fromkeys(f"{width}x{height}" for width, height in (self.smallest, self.largest))
        return " to ".join(ends)

    def notes(self, form: ImageSettings | None) -> tuple[str, ...]:
        """What was done to the images to bring them to this form, for the user; padding alone is not worth a word."""
        if form is None:
            return ()
        said = []
        into = f"{form.size}x{form.size}"
        if form.fit == "resize" and self.sizes != into:
            said.append(f"resized to {into}")
        elif self.side > form.size:
            said.append(f"scaled down to fit into {into}")
        elif self.smallest != self.largest:
            said.append(f"padded to {into}")
        if form.channels == 1 and self.channels == 3:
            said.append("colours are dropped (image.channels=1)")
        return tuple(said)


def digest_of(pixels: NDArray[np.uint8]) -> bytes:
    """sha256 of an image, (H, W) or (H, W, 3), and of its shape."""
    return hashlib.sha256(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).digest()


def image_digests(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """sha256 of each image, uint8 (N, 32). Never store those of private images."""
    found = b"".join(digest_of(image) for block in blocks(images) for image in block)
    return np.frombuffer(found, np.uint8).reshape(-1, DIGEST)
