"""Where images are read from, what was asked, and what a reader found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rapid.data.canvas import Target
from rapid.data.origin import Origin
from rapid.data.stored import Stored
from rapid.data.units import PeopleFrom
from rapid.errors import InputError


class Labels(NamedTuple):
    """The label of each image."""

    numbers: NDArray[np.int64]
    """Indices into `names`, (N,)."""
    names: tuple[str, ...]
    """Class names."""
    declared: bool
    """Whether the names were given, not taken from the labels."""


class Records(NamedTuple):
    """What a reader found."""

    images: NDArray[np.uint8]
    """(N, H, W) or (N, H, W, 3)."""
    labels: Labels | None = None
    """None if the images are unlabelled."""
    units: NDArray[np.int64] | None = None
    """Number of the person that each image shows, (N,); None if people were not asked for."""
    notes: tuple[str, ...] = ()
    """See `ImageSet`."""
    origins: tuple[Origin, ...] = ()
    """See `ImageSet`."""
    stored: Stored | None = None
    """See `ImageSet`."""
    digests: NDArray[np.uint8] | None = None
    """See `ImageSet`."""
    soft_labels: NDArray[np.float32] | None = None
    """See `ImageSet`."""


@dataclass(frozen=True)
class Source:
    """A path, the arguments that say how to read it, and how much of it messages tell.

    Attributes:
        path: the set.
        field: name of the argument that gave the path.
        show_paths: whether messages name files and what is in them.
        classes: declared class names; None: those of the set.
        people: where the set says whose image each is; None: each image is a unit.
        label_column: column of the labels, "none" for unlabelled images; None: found by its name.
        target: the form that images get.
        digests: whether the images are hashed as they are stored.
        soft_labels: whether probabilities of the classes are read.
    """

    path: Path
    field: str
    show_paths: bool = True
    classes: tuple[str, ...] | None = None
    people: PeopleFrom | None = None
    label_column: str | None = None
    target: Target = None
    digests: bool = False
    soft_labels: bool = False

    def error(self, general: str, detail: str | None = None, file: Path | str | None = None) -> InputError:
        """The error about the content.

        Args:
            general: what is wrong, without a file's name and without a value from inside.
            detail: the same with names and values, if they may be shown.
            file: to which `detail` belongs; default: the set.
        """
        if detail is None:
            return InputError(self.field, general, self.path)
        if self.show_paths:
            return InputError(self.field, detail, file or self.path)
        return InputError(self.field, f"{general}; rerun with --show-paths for details", self.path)
