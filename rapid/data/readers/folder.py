"""Folders of images: one sub-folder per class, all images in the folder itself, or either of them in nested splits."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid.data.classes import class_folders, class_name, is_hidden
from rapid.data.readers.columns import NONE
from rapid.data.readers.decode import Encoded, decode
from rapid.data.readers.labels import from_numbers, people_called
from rapid.data.readers.source import Labels, Records, Source
from rapid.data.readers.suffixes import ARROW, IMAGES, PARQUET, TABLES, TARS, UNREAD
from rapid.errors import InputError

SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
"""Names of sub-folders that are parts of a set, if the folders in them are the classes, or if they have no folders and
one of them is called as in `FIRST`: then the images are unlabelled."""
FIRST = SPLITS[:2]
NAME = "the name of a sub-folder"
UNUSED = (
    "lies beside the images and is not read: call it labels.csv (.tsv, .jsonl) or give its path; if it has no labels, "
    "move it elsewhere or add --label-column none"
)
MIXED = "lies beside the images and is not read; give its path, or move it elsewhere"
DEEPER = "deeper than one sub-folder per class: move them up, or give the path of one split"
PEOPLE_IN_SPLITS = (
    "has people in folders that are called as splits, not classes: give the path of one of them, or declare --classes"
)
DEEP_SET = "lies too deep to be read; give the path of the folder that it is in"
ARROW_FOLDER = (
    "is a folder of Arrow files, as save_to_disk of datasets writes them, and these are not read; write each split as "
    "Parquet by to_parquet, such as train.parquet"
)
PEOPLE = ", or add --unit-folders if the folders in it are people"
"""Images where none are read; inner folders may be splits, people, or a mistake."""
NOBODY = (
    "a folder has a name such as NA, nan, NULL or None, or a blank one; call each by the person whose images it has"
)
CONVERT = "is of a format that is not read; convert it to PNG or JPEG"
UNREADABLE = "a sub-folder cannot be read; give yourself the right to read it"
Group = tuple[int, str, Sequence[str]]
"""Number of the class, name of the person or "", and paths of images."""


def read_folder(source: Source) -> Records:
    """Read a folder of images.

    Raises:
        InputError: see `load_images`.
    """
    if source.people is not None and source.people.column is not None:
        raise InputError(
            "unit_column",
            "is for .npz files and tables; for a folder of images use --unit-folders",
            source.people.column,
        )
    if source.label_column not in (None, NONE):
        problem = "is not for a folder of images, whose sub-folders are the labels; leave it out"
        raise InputError("label_column", problem, source.label_column)
    try:
        names, groups = _classes(source) if source.people is None else _people(source)
        plain = source.people is None and not names
        files = [file for _, _, group in groups for file in group]
        folders = {Path(file).parent for file in files}
        _check_all_read(source, folders)
        # whose name is a class if it is declared: then it matters not whether another one has images
        if (plain and folders) or (len(folders) == 1 and not (names and source.classes)):
            _check_alone(source, {source.path, *folders})
    except OSError as error:
        raise source.error(UNREADABLE, f"{UNREADABLE} ({error.strerror})", error.filename) from None
    if not files:
        raise _no_images(source)
    sizes = [len(group) for _, _, group in groups]
    labels: Labels | None = None
    if names:
        labels = from_numbers(np.repeat([number for number, _, _ in groups], sizes), names, source, NAME)
    units: NDArray[np.int64] | None = None
    if source.people is not None:
        units = people_called([who for _, who, group in groups for _ in group])
        if units is None:
            raise InputError("unit_folders", NOBODY)
    found = decode(lambda: map(Encoded, files), source)
    if plain and len(folders) > 1:
        parts = ", ".join(sorted(folder.name for folder in folders))
        found = found._replace(notes=(*found.notes, f"without labels: {parts} are taken for splits, not classes"))
    return found._replace(labels=labels, units=units)


def _check_all_read(source: Source, read: Set[Path]) -> None:
    """Raise if the folder has images that are not among those of the set: they would be lost without a word.

    Args:
        source: the folder.
        read: it or the folders in it, whose images are the set.
    """
    for place, inner, names in os.walk(source.path):
        inner[:] = sorted(name for name in inner if not is_hidden(name))
        folder = Path(place)
        if unread := [name for name in names if name.lower().endswith(UNREAD) and not name.startswith(".")]:
            raise source.error(f"an image {CONVERT}", CONVERT, folder / min(unread))
        if folder not in read and any(map(is_image, names)):
            # of public images nobody asks who is on them; those of an account of the ledger are private
            more = PEOPLE if source.field in ("private", "DATASET") and source.people is None else ""
            problem = f"has images {DEEPER}{more}"
            raise source.error(problem, f"'{folder.relative_to(source.path)}' {problem}")


def _no_images(source: Source) -> InputError:
    """The error about a folder without images, which says how to read what it has."""
    nothing = f"has no images ({', '.join(IMAGES)})"
    for place, inner, names in os.walk(source.path):
        inner[:] = sorted(name for name in inner if not is_hidden(name))
        seen = sorted(name for name in names if not name.startswith("."))
        if any(name.lower().endswith(ARROW) for name in seen):
            return source.error(ARROW_FOLDER)
        if sets := [name for name in seen if name.lower().endswith((PARQUET, *TARS))]:
            deep = Path(place).relative_to(source.path) / sets[0]
            return source.error(f"has no images, but a set that {DEEP_SET}", f"has no images, but '{deep}' {DEEP_SET}")
    return source.error(nothing)


def _check_alone(source: Source, folders: Set[Path]) -> None:
    """Raise if a table or another set lies beside images of a single folder, whose name need not be their label."""
    names = sorted(file.name for folder in folders for file in folder.iterdir() if file.name[0] != ".")
    if source.label_column is None and (tables := [name for name in names if name.lower().endswith(TABLES)]):
        raise source.error(f"a table {UNUSED}", f"'{tables[0]}' {UNUSED}")
    data = source.path / "data"
    names += sorted(file.name for file in data.iterdir()) if data.is_dir() else []
    if sets := [name for name in names if name.lower().endswith((PARQUET, *TARS))]:
        raise source.error(f"another set {MIXED}", f"'{sets[0]}' {MIXED}")


def folder_files(source: Source) -> list[str]:
    """Paths of all images in the order in which `read_folder` reads them, without people."""
    return [file for _, _, group in _classes(source)[1] for file in group]


def image_files(folder: Path) -> list[str]:
    """Paths of the images in a folder, by name; hidden files are not among them."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if is_image(entry.name)]
    return [str(folder / name) for name in sorted(names)]


def has_image(folder: Path) -> bool:
    """Whether there is an image in a folder itself."""
    with os.scandir(folder) as entries:
        return any(is_image(entry.name) for entry in entries)


def is_image(name: str) -> bool:
    """Whether a file of this name is an image, and not a hidden file."""
    return name.lower().endswith(IMAGES) and not name.startswith(".")


def _classes(source: Source) -> tuple[tuple[str, ...], list[Group]]:
    """Class names, none if the images are unlabelled, and the images of each class."""
    folders, loose = class_folders(source.path), image_files(source.path)
    if folders and loose:
        raise source.error("has both images and sub-folders; use one sub-folder per class, or none")
    if not folders:
        return (), [(0, "", loose)]
    if are_plain_splits(folders, source):
        return (), [(0, "", image_files(folder)) for folder in folders]
    if _are_splits(folders):
        parts = [one for folder in folders for one in class_folders(folder)]
        names = tuple(sorted({class_name(one) for one in parts}))
        return names, [(names.index(class_name(one)), "", image_files(one)) for one in parts]
    return tuple(map(class_name, folders)), [(number, "", image_files(folder)) for number, folder in enumerate(folders)]


def _are_splits(folders: Sequence[Path]) -> bool:
    """Whether all folders have the names of splits, and hold folders, not images."""
    return all(folder.name.lower() in SPLITS and class_folders(folder) and not has_image(folder) for folder in folders)


def are_plain_splits(folders: Sequence[Path], source: Source) -> bool:
    """Whether folders of a set are splits of unlabelled images. Their names decide, not which of them have images."""
    return _are_called_splits(folders, source) and not any(map(class_folders, folders))


def _are_called_splits(folders: Sequence[Path], source: Source) -> bool:
    """Whether the names of folders are those of splits, one of them to train on, and no classes are declared."""
    names = {folder.name.lower() for folder in folders}
    return source.classes is None and names <= set(SPLITS) and not names.isdisjoint(FIRST)


def _people(source: Source) -> tuple[tuple[str, ...], list[Group]]:
    """As `_classes`, of `class/person/*.png`, or if no sub-folder has sub-folders, of `person/*.png`."""
    folders, loose = class_folders(source.path), image_files(source.path)
    inner = [class_folders(folder) for folder in folders]
    labelled = any(inner)
    if labelled and _are_called_splits(folders, source):
        raise source.error(PEOPLE_IN_SPLITS)
    if labelled:
        loose = [*loose, *(file for folder in folders for file in image_files(folder))]
    people = [(number, one) for number, group in enumerate(inner) for one in group] or list(enumerate(folders))
    if loose or (labelled and any(class_folders(one) for _, one in people)):
        raise source.error("with --unit-folders every image lies in a person's folder: class/person or person")
    groups: list[Group] = [(number, one.name, image_files(one)) for number, one in people]
    return tuple(map(class_name, folders)) if labelled else (), groups
