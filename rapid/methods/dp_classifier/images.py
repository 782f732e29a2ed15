"""Public images with their labels, as a component of a public bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rapid.errors import InputError

NAME = "public_images"


class LabelledImages:
    """Public images for gradients beside the private ones.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3).
        labels: names of their classes.
    """

    FILE = "images.npz"

    def __init__(self, images: NDArray[np.uint8], labels: list[str]) -> None:
        self.images = images
        self.labels = labels

    def save(self, folder: Path) -> None:
        """Write `images.npz`."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / self.FILE, images=self.images, labels=np.array(self.labels, dtype=np.str_))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read them.

        Raises:
            InputError: missing or damaged.
        """
        try:
            with np.load(folder / cls.FILE) as found:
                return cls(found["images"], [str(name) for name in found["labels"]])
        except (OSError, ValueError, KeyError):
            raise InputError("", f"{folder / cls.FILE} is missing or damaged; copy the bundle again") from None
