"""Sets of labelled or unlabelled images, read from a folder or an `.npz` file."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rapid.data.classes import checked, class_folders
from rapid.data.units import PeopleFrom, numbered
from rapid.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
GREY_MODES = ("1", "L", "LA", "I", "I;16", "F")
ARRAYS = ("images", "labels", "classes")
"""Of an `.npz` file."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    Attributes:
        images: uint8, (N, H, W) grey or (N, H, W, 3) RGB.
        labels: int64, (N,), indices into `classes`; None if the images are unlabelled.
        classes: class names; empty if the images are unlabelled.
        source: where the images come from, for messages.
        declared: whether the class names were given, not taken from the labels.
        units: int64, (N,), the number of the person that each image shows, 0..people-1, each at least once; None if
            every image is a unit of its own.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    source: str = ""
    declared: bool = True
    units: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for RGB."""
        return 1 if self.images.ndim == 3 else 3

    @property
    def unit_count(self) -> int:
        """Number of people if the unit is a person, else of images."""
        return len(self) if self.units is None else int(self.units.max()) + 1

    def fingerprint(self) -> str:
        """sha256 (hex) of pixels, labels, classes and units, to detect changes. Never store that of private images."""
        digest = hashlib.sha256(repr((self.images.shape, self.classes)).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        if self.labels is not None:
            digest.update(np.ascontiguousarray(self.labels).data)
        if self.units is not None:
            digest.update(b"units" + self.units.tobytes())
        return digest.hexdigest()


def load_images(
    path: Path,
    field: str,
    classes: Sequence[str] | None = None,
    *,
    show_paths: bool = True,
    people: PeopleFrom | None = None,
) -> ImageSet:
    """Read images from a folder (flat, or one sub-folder per class) or an `.npz` file.

    An `.npz` holds `images` and, if they are labelled, `labels` and optionally `classes`. A sub-folder without images,
    like a name in `classes` that no label has, is a class without images.

    Args:
        path: the folder or file.
        field: name of the argument that gave the path, such as "public"; for messages.
        classes: declared class names, whose order numbers them. Sub-folders, and the names of an `.npz`, must be among
            them; labels of an `.npz` without names are their numbers. Default: those of the set.
        show_paths: name files, and what is wrong in them, in messages. False for private images.
        people: where the set says whose image each is; default: every image is a unit of its own.

    Raises:
        InputError: nothing there, no images, unreadable images, mixed sizes or colour modes, wrong types, a label
            that is not among `classes`, or images without a person where `people` is given.
    """
    if not path.exists():
        raise InputError(field, "does not exist; give a folder of images or an .npz file", path)
    source = _Source(path, field, show_paths)
    if classes is not None:
        checked(classes, "classes")
    with nullcontext() if show_paths else _quiet():
        if path.is_dir():
            if people is not None and people.column is not None:
                raise InputError("unit_column", "is for .npz files; for a folder use --unit-folders", path)
            found = _load_folder(source, classes) if people is None else _load_people(source, classes)
        elif path.suffix == ".npz":
            if people is not None and people.column is None:
                raise InputError("unit_folders", "is for folders; for an .npz file use --unit-column NAME", path)
            found = _load_npz(source, classes, people.column if people else None)
        else:
            raise InputError(field, "is neither a folder nor an .npz file", path)
    if classes is not None and found.labels is None:
        raise InputError(field, "has no labels, so there are no classes to declare; leave out --classes", path)
    return found


def join(sets: Sequence[ImageSet], field: str) -> ImageSet:
    """Concatenate image sets of one size. Classes of different sets stay apart.

    If two sets share a class name, all names are prefixed with the name of their set.

    Args:
        sets: at least one.
        field: name of the argument that gave the paths; for messages.

    Raises:
        InputError: the sets differ in size or channels, or only some are labelled.
    """
    if len(sets) == 1:
        return sets[0]
    shapes = {s.images.shape[1:] for s in sets}
    if len(shapes) > 1:
        raise InputError(field, f"the sets differ in size or channels: {sorted(shapes)}; convert them first")
    images = np.concatenate([s.images for s in sets])
    source = ", ".join(s.source for s in sets)
    labelled = [s for s in sets if s.labels is not None]
    if not labelled:
        return ImageSet(images, None, (), source)
    if len(labelled) < len(sets):
        raise InputError(field, "some sets are labelled and some are not; label all of them or none")
    names = [name for s in sets for name in s.classes]
    if len(set(names)) < len(names):
        stems = [Path(s.source).stem for s in sets]
        if len(set(stems)) < len(stems):
            stems = [f"{stem}-{number}" for number, stem in enumerate(stems, 1)]
        names = [f"{stem}/{name}" for stem, s in zip(stems, sets, strict=True) for name in s.classes]
    offsets = np.cumsum([0, *(len(s.classes) for s in sets[:-1])])
    labels = np.concatenate(
        [s.labels + offset for s, offset in zip(sets, offsets, strict=True) if s.labels is not None]
    )
    return ImageSet(images, labels, tuple(names), source)


@dataclass(frozen=True)
class _Source:
    """Where images are read from, and how much of it messages tell."""

    path: Path
    field: str
    show_paths: bool

    def error(self, general: str, detail: str | None = None, file: Path | None = None) -> InputError:
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
        return InputError(self.field, f"{general}; rerun with --show-paths to see which", self.path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of libraries, which tell about single files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load_npz(source: _Source, classes: Sequence[str] | None, column: str | None) -> ImageSet:
    arrays = _arrays(source, column)
    if "images" not in arrays:
        missing = "has no array 'images'"
        raise source.error(missing, f"{missing} (found: {', '.join(arrays) or 'nothing'})")
    images = arrays["images"]
    if images.dtype != np.uint8:
        raise source.error(f"'images' is {images.dtype}, expected uint8 with values 0..255")
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    if not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        expected = "expected (N, H, W) or (N, H, W, 3)"
        raise source.error(f"'images' has shape {_shape(images, column)}, {expected}")
    if 0 in images.shape:
        raise source.error("has no images")
    units = None if column is None else _column(arrays, column, len(images), source)
    if "labels" not in arrays:
        return ImageSet(images, None, (), str(source.path), units=units)
    labels = _check_labels(arrays["labels"], len(images), source, column)
    if labels.min() < 0:
        raise source.error("'labels' must be at least 0")
    if "classes" in arrays:
        names = tuple(str(name) for name in arrays["classes"].reshape(-1))
    else:
        names = tuple(classes or map(str, range(int(labels.max()) + 1)))
    if len(set(names)) < len(names):
        raise source.error("'classes' has a name twice")
    if labels.max() >= len(names):
        raise source.error(f"'labels' must lie in 0..{len(names) - 1}: there are {len(names)} classes")
    if classes is not None:
        names, labels = tuple(classes), _numbers(names, classes, "a name of its 'classes'", source)[labels]
    declared = "classes" in arrays or classes is not None
    return ImageSet(images, labels, names, str(source.path), declared, units)


def _arrays(source: _Source, column: str | None) -> dict[str, NDArray[Any]]:
    wanted = (*ARRAYS, column)
    try:
        # np.load leaves a damaged file open, so open it here
        with source.path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive if "images" not in archive or name in wanted}
    except MemoryError:
        raise
    except Exception:  # damaged files raise errors of all kinds, whose messages hold bytes of the file
        raise source.error("is damaged or not an .npz file; write it with numpy.savez") from None


def _column(arrays: dict[str, NDArray[Any]], column: str, count: int, source: _Source) -> NDArray[np.int64]:
    """The number of the person that each image shows."""
    if column not in arrays:
        raise InputError("unit_column", "is not an array of --private", column)
    names = arrays[column]
    if names.dtype.kind not in "iuU":
        raise InputError("unit_column", "must be an array of strings or integers", column)
    if names.shape != (count,):
        raise InputError("unit_column", "must be an array with one entry for each image", column)
    if names.dtype.kind != "U":
        return np.unique(names, return_inverse=True)[1].reshape(-1).astype(np.int64)
    if not all(names):
        # images of several people would be protected as if they were of one
        raise InputError("unit_column", "has an empty entry; say for every image whose it is", column)
    return numbered(names)


def _shape(array: NDArray[Any], column: str | None) -> str:
    """The shape for a message, without N if people are the units: how many images they have is not public."""
    return str(array.shape) if column is None else f"({', '.join(['N', *map(str, array.shape[1:])])})"


def _check_labels(labels: NDArray[Any], count: int, source: _Source, column: str | None) -> NDArray[np.int64]:
    if labels.shape != (count,):
        if column is not None:
            raise source.error("'labels' must have one number for each image")
        raise source.error(f"'labels' has shape {labels.shape}, expected ({count},): one for each image")
    if labels.dtype.kind not in "iu":
        raise source.error(f"'labels' is {labels.dtype}, expected integers")
    return labels.astype(np.int64)


def _numbers(names: Sequence[str], classes: Sequence[str], what: str, source: _Source) -> NDArray[np.int64]:
    """Number of each name among the declared classes.

    Raises:
        InputError: a name is not declared.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    if others := [name for name in names if name not in numbers]:
        raise source.error(f"{what} is not among --classes", f"{what} is not among --classes: '{others[0]}'")
    return np.array([numbers[name] for name in names], np.int64)


def _load_folder(source: _Source, classes: Sequence[str] | None) -> ImageSet:
    try:
        folders, loose = class_folders(source.path), _image_files(source.path)
        groups = [_image_files(folder) for folder in folders] if folders else [loose]
    except OSError as error:
        raise source.error("a sub-folder cannot be read", str(error)) from None
    if folders and loose:
        raise source.error("has both images and sub-folders; use one sub-folder per class, or none")
    names = tuple(folder.name for folder in folders)
    numbers = np.arange(len(groups), dtype=np.int64)
    if folders and classes is not None:
        names, numbers = tuple(classes), _numbers(names, classes, "the name of a sub-folder", source)
    images = _read_images([file for group in groups for file in group], source)
    labels = np.repeat(numbers, [len(group) for group in groups]) if folders else None
    return ImageSet(images, labels, names, str(source.path))


def _load_people(source: _Source, classes: Sequence[str] | None) -> ImageSet:
    """The images of `class/person/*.png`, or if no sub-folder has sub-folders, of `person/*.png`."""
    try:
        folders, loose = class_folders(source.path), _image_files(source.path)
        inner = [class_folders(folder) for folder in folders]
        labelled = any(inner)
        if labelled:
            loose = [*loose, *(file for folder in folders for file in _image_files(folder))]
        people = [(number, one) for number, group in enumerate(inner) for one in group]
        groups = [(number, one.name, _image_files(one)) for number, one in people or enumerate(folders)]
        deeper = any(class_folders(one) for _, one in people)
    except OSError as error:
        raise source.error("a sub-folder cannot be read", str(error)) from None
    if loose or deeper:
        raise source.error("with --unit-folders every image lies in a person's folder: class/person or person")
    names = tuple(folder.name for folder in folders) if labelled else ()
    numbers = np.arange(len(folders), dtype=np.int64)
    if labelled and classes is not None:
        names, numbers = tuple(classes), _numbers(names, classes, "the name of a sub-folder", source)
    images = _read_images([file for _, _, group in groups for file in group], source)
    sizes = [len(group) for _, _, group in groups]
    labels = np.repeat(numbers[[number for number, _, _ in groups]], sizes) if labelled else None
    units = numbered(name for _, name, group in groups for _ in group)
    return ImageSet(images, labels, names, str(source.path), units=units)


def _read_images(files: Sequence[Path], source: _Source) -> NDArray[np.uint8]:
    if not files:
        raise source.error(f"has no images ({', '.join(SUFFIXES)})")
    first = _read_image(files[0], source)
    images = np.empty((len(files), *first.shape), np.uint8)
    for number, file in enumerate(files):
        image = _read_image(file, source)
        if image.shape != first.shape:
            convert = "convert all images to one size and colour mode"
            detail = f"{file.name} is {_describe(image)}, expected {_describe(first)} like the first image; {convert}"
            raise source.error(f"the images have several sizes or colour modes; {convert}", detail)
        images[number] = image
    return images


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _read_image(file: Path, source: _Source) -> NDArray[np.uint8]:
    try:
        with Image.open(file) as image:
            deep = image.mode.startswith("I;16") or image.mode in ("I", "F")
            pixels = np.asarray(image.convert("L" if image.mode in GREY_MODES else "RGB"), np.uint8)
    except MemoryError:
        raise
    except Exception:  # decoders raise errors of all kinds for damaged files
        problem = "is not a readable image (damaged or truncated); repair or remove it"
        raise source.error(f"a file {problem}", problem, file) from None
    if deep:
        problem = "has more than 8 bits per channel; convert it to 8-bit grey or RGB"
        raise source.error(f"an image {problem}", problem, file)
    return pixels


def _describe(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[1]}x{image.shape[0]} {'grey' if image.ndim == 2 else 'RGB'}"
