"""A private image set: where it is, and how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rapid.config.sections import ImageSettings
from rapid.data.image_set import ImageSet
from rapid.data.images import load_images
from rapid.data.units import PeopleFrom
from rapid.errors import InputError


@dataclass(frozen=True)
class PrivateImages:
    """A path, with what says how to read it; nothing is read before `load`.

    Attributes:
        path: the set; see `load_images`.
        classes: declared class names, which become those of the model; None: the sub-folders or the array `classes`.
        people: where the set says whose image each is: the unit is then one person; None: one image.
        label_column: see `load_images`.
        show_paths: name private files in error messages.
    """

    path: Path
    classes: Sequence[str] | None = None
    people: PeopleFrom | None = None
    label_column: str | None = None
    show_paths: bool = False

    def load(self, form: ImageSettings, *, digests: bool = False) -> ImageSet:
        """The images in the form of a model.

        Args:
            form: public settings; each image is brought to it by itself.
            digests: see `load_images`.

        Raises:
            InputError: see `load_images`; or there is a single image, or person.
            Stopped: a stop was requested.
        """
        found = load_images(
            self.path,
            "private",
            self.classes,
            show_paths=self.show_paths,
            people=self.people,
            label_column=self.label_column,
            target=form,
            digests=digests,
        )
        if found.unit_count == 1:
            # N is public
            one, more = ("image", "images") if found.units is None else ("person", "people")
            raise InputError(
                "private", f"has a single {one}, and noise hides one among many; give more {more}", self.path
            )
        return found
