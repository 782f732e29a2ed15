"""Names of the images of a set, for a list of results."""

from __future__ import annotations

from pathlib import Path

from rapid.data.readers import find_reader
from rapid.data.readers.columns import NONE
from rapid.data.readers.folder import folder_files, read_folder
from rapid.data.readers.metadata import read_metadata, table_names
from rapid.data.readers.source import Source


def image_names(path: Path, count: int) -> list[str]:
    """The names of images, in the order of `load_images`.

    Those that a table gives them; or else the names of files relative to the folder; of any other format row numbers.

    Args:
        path: a set that `load_images` has read.
        count: number of its images.
    """
    source = Source(path, "data", label_column=NONE)
    reader = find_reader(source)
    names = table_names(source) if reader is read_metadata else None
    if names is None and reader in (read_metadata, read_folder):
        names = [Path(file).relative_to(path).as_posix() for file in folder_files(source)]
    if names is not None and len(names) == count:
        return names
    return [str(number) for number in range(count)]
