"""`.npz` files: arrays `images` and, if they are labelled, `labels` and optionally `classes`.

Generated images have the text of their provenance in a string `rapid` beside them.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from rapid import mapped
from rapid.data.canvas import Canvas
from rapid.data.fit import TooLargeError, fit_pixels
from rapid.data.origin import KEYWORD, Origin, origins_in
from rapid.data.readers.columns import LABELS, NONE
from rapid.data.readers.labels import from_numbers, people_of
from rapid.data.readers.soft_labels import as_rows, read_soft_labels
from rapid.data.readers.source import Labels, Records, Source
from rapid.data.stored import Stored, image_digests
from rapid.errors import DENIED, InputError
from rapid.metadata import SOFT_LABELS

IMAGES = "images.npy"
OTHER_NAMES = (*LABELS, "y", "targets")
"""What labels may be called."""
LOCAL_HEADER = 30
"""Bytes of a member's header in a zip file, before its name."""
READ = 1 << 22
"""Bytes that are read at a time."""


def read_archive(source: Source) -> Records:
    """Read an `.npz` file. Large images that are not compressed are mapped from the file.

    Raises:
        InputError: see `load_images`.
    """
    people = source.people
    if people is not None and people.column is None:
        raise InputError("unit_folders", "is for folders; for an .npz file use --unit-column NAME", source.path)
    column = people.column if people else None
    wanted = source.label_column or "labels"
    try:
        # np.load leaves a damaged file open, so open it here
        with source.path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            names = list(archive.files)
            soft = SOFT_LABELS if source.soft_labels else None
            asked = {name for name in (wanted, "classes", column, soft) if name is not None} - {"images"}
            small = {name: _array(archive, name, source) for name in names if name in asked}
            origins = _origins(archive)
        images = _images(source.path) if "images" in names else None
    except (MemoryError, InputError):
        raise
    except PermissionError:
        raise source.error(DENIED) from None
    except Exception:  # damaged files raise errors of all kinds, whose messages hold bytes of the file
        raise source.error("is damaged or not an .npz file; write it with numpy.savez") from None
    if images is None:
        missing = "has no array 'images'"
        raise source.error(missing, f"{missing} (found: {', '.join(names) or 'nothing'})")
    if images.dtype != np.uint8:
        raise source.error(f"'images' is {images.dtype}, expected uint8 with values 0..255")
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    if not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        expected = "expected (N, H, W) or (N, H, W, 3)"
        raise source.error(f"'images' has shape {_shape(images, column)}, {expected}")
    if 0 in images.shape:
        raise source.error("has no images")
    others = [name for name in names if name in OTHER_NAMES and name != column]
    if others and source.label_column is None and wanted not in names:
        unsaid = "is not read: name the array of the labels by --label-column NAME; --label-column none: no labels"
        raise source.error(f"an array {unsaid}", f"the array '{others[0]}' {unsaid}")
    units = None if column is None else _units(small | {"images": images}, column, len(images))
    labels = _labels(small, wanted, len(images), source, column)
    stored, target = Stored.alike(images), source.target
    form = target.form(stored) if isinstance(target, Canvas) else target
    digests = image_digests(images) if source.digests else None
    try:
        fitted = images if form is None else fit_pixels(images, form)
    except TooLargeError as error:
        raise source.error(str(error), f"has images of {stored.sizes}; {error}") from None
    chances = read_soft_labels([as_rows(small[SOFT_LABELS], source)], labels, source) if soft in small else None
    return Records(fitted, labels, units, stored.notes(form), origins, stored, digests, chances)


def _array(archive: NpzFile, name: str, source: Source) -> NDArray[Any]:
    members = archive.zip
    assert members is not None
    if (file := f"{name}.npy") in members.namelist():
        with members.open(file) as member:
            if _header(member)[2].hasobject:
                problem = "holds Python objects; write it as an array of strings or integers"
                raise source.error(f"an array {problem}", f"the array '{name}' {problem}")
    found: NDArray[Any] = archive[name]
    return found


def _origins(archive: Mapping[str, NDArray[Any]]) -> tuple[Origin, ...]:
    """The private models that made the images."""
    try:
        text = archive.get(KEYWORD, np.empty(0))
    except ValueError:
        # Python objects: not a text, and not looked at
        return ()
    return origins_in(str(text)) if text.dtype.kind == "U" and text.ndim == 0 else ()


def _labels(
    arrays: dict[str, NDArray[Any]], wanted: str, count: int, source: Source, column: str | None
) -> Labels | None:
    if wanted not in arrays:
        if source.label_column not in (None, NONE):
            raise InputError("label_column", f"is not an array of --{source.field}", wanted)
        return None
    labels = arrays[wanted]
    if labels.shape != (count,):
        if column is not None:
            raise source.error(f"'{wanted}' must have one number for each image")
        raise source.error(f"'{wanted}' has shape {labels.shape}, expected ({count},): one for each image")
    if labels.dtype.kind not in "iu":
        raise source.error(f"'{wanted}' is {labels.dtype}, expected integers")
    names = _names(arrays["classes"], source) if "classes" in arrays else None
    return from_numbers(labels.astype(np.int64), names, source, "a name of its 'classes'", called=wanted)


def _names(classes: NDArray[Any], source: Source) -> tuple[str, ...]:
    if classes.dtype.kind == "S":
        try:
            classes = np.char.decode(classes, "utf-8")
        except UnicodeDecodeError:
            raise source.error("'classes' has names that are not UTF-8; write it as an array of strings") from None
    return tuple(str(name) for name in classes.reshape(-1))


def _units(arrays: dict[str, NDArray[Any]], column: str, count: int) -> NDArray[np.int64]:
    """The number of the person that each image shows."""
    if column not in arrays:
        raise InputError("unit_column", "is not an array of --private", column)
    names = arrays[column]
    if names.dtype.kind not in "iuU":
        raise InputError("unit_column", "must be an array of strings or integers", column)
    if names.shape != (count,):
        raise InputError("unit_column", "must be an array with one entry for each image", column)
    return people_of(names.tolist(), column)


def _shape(array: NDArray[Any], column: str | None) -> str:
    """The shape for a message, without N if people are the units: how many images they have is not public."""
    return str(array.shape) if column is None else f"({', '.join(['N', *map(str, array.shape[1:])])})"


def _images(path: Path) -> NDArray[Any]:
    """The array `images`.

    Raises:
        Exception: of any kind, if the file is damaged.
    """
    with zipfile.ZipFile(path) as archive, archive.open(IMAGES) as member:
        shape, fortran, dtype = _header(member)
        if dtype != np.uint8:
            # refused by its dtype, so there is no need to read it
            return np.empty(0, dtype)
        size = math.prod(shape)
        info, start = archive.getinfo(IMAGES), member.tell()
        if start + size != info.file_size:
            raise ValueError("ends early")
        if fortran:
            return np.ascontiguousarray(np.frombuffer(member.read(), np.uint8).reshape(shape, order="F"))
        if info.compress_type == zipfile.ZIP_STORED and size > mapped.LARGE:
            return _mapped(path, info, start, shape)
        images = mapped.empty(shape)
        flat = images.reshape(-1)
        for place in range(0, size, READ):
            part = member.read(min(READ, size - place))
            flat[place : place + len(part)] = np.frombuffer(part, np.uint8)
        # the checksum is compared at the end of the member
        member.read(1)
        return images


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the order is that of Fortran, and dtype of an array in the .npy format."""
    version = npy.read_magic(member)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, fortran, dtype = read(member)
    return shape, fortran, dtype


def _mapped(path: Path, info: zipfile.ZipInfo, start: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array that begins at byte `start` of a member that is not compressed; its checksum is compared first."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name, extra = struct.unpack("<26xHH", file.read(LOCAL_HEADER))
        begin = info.header_offset + LOCAL_HEADER + name + extra
        file.seek(begin)
        checksum = zlib.crc32(file.read(start))
        left = info.file_size - start
        while left > 0 and (part := file.read(min(READ, left))):
            checksum, left = zlib.crc32(part, checksum), left - len(part)
    if checksum != info.CRC:
        raise ValueError("checksum differs")
    return mapped.map_file(path, begin + start, shape)
