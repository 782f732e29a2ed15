"""Readers of image sets, one for each format; all return the same `Records`.

Adding a format: a module here with a function `Source -> Records`, and a line in `READERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rapid.data.classes import class_folders
from rapid.data.readers.archive import read_archive
from rapid.data.readers.folder import UNREADABLE, has_image, read_folder
from rapid.data.readers.metadata import has_metadata, read_metadata
from rapid.data.readers.source import Records, Source
from rapid.data.readers.table import has_tables, read_table
from rapid.data.readers.tar import has_tars, read_tar
from rapid.errors import InputError

FORMATS = "a folder of images, an .npz, a .csv or .jsonl of labels, a .parquet or a .tar"


class Reader(NamedTuple):
    """How one format is recognised and read."""

    fits: Callable[[Path], bool]
    """Whether a path, which exists, has this format."""
    read: Callable[[Source], Records]


READERS = (
    Reader(lambda path: path.suffix == ".npz" and path.is_file(), read_archive),
    Reader(has_metadata, read_metadata),
    Reader(lambda path: path.is_dir() and _has_images(path), read_folder),
    Reader(has_tables, read_table),
    Reader(has_tars, read_tar),
    Reader(Path.is_dir, read_folder),
)
"""The first that fits reads a path."""


def _has_images(path: Path) -> bool:
    """Whether there are images in a folder or its sub-folders; archives beside them are not looked at."""
    return any(has_image(folder) for folder in (path, *class_folders(path)))


def find_reader(source: Source) -> Callable[[Source], Records]:
    """The reader of a path.

    Raises:
        InputError: no format fits.
    """
    if source.people is not None and source.people.column is None and source.path.is_dir():
        return read_folder
    try:
        for reader in READERS:
            if reader.fits(source.path):
                return reader.read
    except OSError as error:
        raise source.error(UNREADABLE, f"{UNREADABLE} ({error.strerror})", error.filename) from None
    raise InputError(source.field, f"is none of these: {FORMATS}", source.path)
