"""Names of the images of a set, for a list of results."""

from __future__ import annotations

from pathlib import Path

from rapid.data.readers import find_reader
from rapid.data.readers.columns import NONE
from rapid.data.readers.folder import folder_files, read_folder
from rapid.data.readers.source import Source


def image_names(path: Path, count: int) -> list[str]:
    """File names relative to a folder of images, in the order of `load_images`; of any other format the row numbers.

    Args:
        path: a set that `load_images` has read.
        count: number of its images.
    """
    source = Source(path, "data", label_column=NONE)
    if find_reader(source) is read_folder:
        files = [Path(file).relative_to(path).as_posix() for file in folder_files(source)]
        if len(files) == count:
            return files
    return [str(number) for number in range(count)]
