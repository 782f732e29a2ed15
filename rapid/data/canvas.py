"""The form of a set whose images decide it themselves, such as public ones before settings are chosen by them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rapid.config.sections import ImageSettings
from rapid.data.stored import Stored

LARGEST_SIDE = 64
"""Pixels a side to which larger images are reduced where no settings say it."""
SIDE_STEP = 16
"""Sides that are chosen are multiples of this."""


def rounded_side(side: int) -> int:
    """The least side that can be chosen for images of this one."""
    return -(-side // SIDE_STEP) * SIDE_STEP


class Canvas(NamedTuple):
    """A common form for images of any size. For private images only where nothing is made of their pixels."""

    side: int = LARGEST_SIDE
    """Images of several sizes are fitted into a square of this side."""
    kept: int | None = LARGEST_SIDE
    """Images that all have one size stay as they are up to this longest side; None: at any size."""
    fit: Literal["pad", "resize", "contain"] = "contain"
    shrinks: bool = True
    """If all of several sizes are smaller, the square is, too. Its side is rounded up as that of a model is: in a model
    of that side each image is where it was put here."""

    def form(self, found: Stored) -> ImageSettings | None:
        """The form of these images; None: they stay as they are."""
        if not found.mixed and (self.kept is None or found.side <= self.kept):
            return None
        size = max(4, min(self.side, rounded_side(found.side)) if self.shrinks else self.side)
        return ImageSettings(size=size, channels=found.channels, fit=self.fit)


Target = ImageSettings | Canvas | None
"""The form that images get when they are read; None: they stay as they are, and must be alike."""
