"""Classes: those of a private set are declared by the user, not taken from its labels; sets are matched by their names.

The list of classes is published with the model. Taken from the labels, it would tell whether the only image of a class
was there.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rapid.errors import DENIED, InputError

if TYPE_CHECKING:
    from rapid.data.image_set import ImageSet

UNDECLARED = (
    "the number of classes of --private is taken from its labels and is published with the model: it is not protected, "
    "and can show that a single image was there. Declare the classes by --classes a,b,c, by --classes FILE with one "
    "name per line, by an array 'classes' in the .npz file, or by a ClassLabel in the Parquet file"
)
"""Warning about a private set without declared classes."""
UNDECLARED_NOTE = "The number of classes was taken from the labels, which is not protected."
"""The same as a note of the privacy statement."""
_OF_SYSTEMS = ("__MACOSX", "@eaDir")
"""Folders that an unpacked archive of macOS and a Synology disk have beside the user's."""


def read_classes(value: str, field: str = "classes") -> tuple[str, ...]:
    """Class names in their order, from the argument `--classes`.

    Args:
        value: names separated by commas ("a," for a single one), or the path of a text file with one name per line, or
            of a folder with one sub-folder per class, which may be empty.
        field: name of the argument; for messages.

    Raises:
        InputError: no names, a name twice, or no such file.
    """
    if "," in value:
        names = value.removesuffix(",").split(",")
    else:
        path = Path(value)
        # unlike those of Path, these take a name that no file can have
        if os.path.isdir(value):  # noqa: PTH112
            return checked([class_name(folder) for folder in class_folders(path)], field, value)
        if os.path.isfile(value):  # noqa: PTH113
            names = _lines(path, field)
        else:
            raise InputError(field, "is neither names such as a,b,c nor a file or folder; a single name is 'a,'", value)
    return checked([name.strip() for name in names], field, value)


def checked(names: Sequence[str], field: str, value: object = None) -> tuple[str, ...]:
    """The names.

    Raises:
        InputError: none, an empty one, or one twice.
    """
    if not names:
        raise InputError(field, "names no classes", value)
    if not all(name.strip() for name in names):
        raise InputError(field, "has an empty name", value)
    if len(set(names)) < len(names):
        raise InputError(field, "has a name twice", value)
    return tuple(names)


def matched_labels(images: ImageSet, classes: Sequence[str], field: str, whose: str) -> NDArray[np.int64]:
    """Labels of images, int64 (N,), as indices into other classes, which are matched by name.

    Args:
        images: labelled.
        classes: the others.
        field: the argument that gave the images; for messages.
        whose: the others' owner, such as "the model"; for messages.

    Raises:
        InputError: there are images of a class that is not among the others.
    """
    assert images.labels is not None
    number_of = {name: number for number, name in enumerate(classes)}
    found = np.array([number_of.get(name, -1) for name in images.classes], np.int64)[images.labels]
    if (found < 0).any():
        name = images.classes[int(images.labels[found < 0][0])]
        problem = f"has the class '{name}', which {whose} does not have (it has {', '.join(classes[:20])})"
        raise InputError(field, f"{problem}; classes are matched by name", images.source)
    return found


def class_folders(path: Path) -> list[Path]:
    """The sub-folders that are classes, by name; hidden ones are not."""
    return sorted(p for p in path.iterdir() if p.is_dir() and not is_hidden(p.name))


def class_name(folder: Path) -> str:
    """The class of a folder: its name, with accents as keyboards write them, not as file systems of macOS do."""
    return unicodedata.normalize("NFC", folder.name)


def is_hidden(name: str) -> bool:
    """Whether a folder of this name is not the user's, but a program's."""
    return name.startswith(".") or name in _OF_SYSTEMS


def _lines(path: Path, field: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except PermissionError:
        raise InputError(field, DENIED, path) from None
    except (OSError, UnicodeDecodeError):
        raise InputError(field, "cannot be read; write a text file with one name per line", path) from None
    return [line for line in lines if line.strip()]
