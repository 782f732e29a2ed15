"""Sets of labelled or unlabelled images, read from a folder or an `.npz` file."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rapid.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
GREY_MODES = ("1", "L", "LA", "I", "I;16", "F")


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    Attributes:
        images: uint8, (N, H, W) grey or (N, H, W, 3) RGB.
        labels: int64, (N,), indices into `classes`; None if the images are unlabelled.
        classes: class names; empty if the images are unlabelled.
        source: where the images come from, for messages.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    source: str = ""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for RGB."""
        return 1 if self.images.ndim == 3 else 3

    def fingerprint(self) -> str:
        """sha256 (hex) of pixels, labels and class names, to detect changes. Never store that of private images."""
        digest = hashlib.sha256(repr((self.images.shape, self.classes)).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        if self.labels is not None:
            digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()


def load_images(path: Path, field: str) -> ImageSet:
    """Read images from a folder (flat, or one sub-folder per class) or an `.npz` file.

    An `.npz` holds `images` and, if they are labelled, `labels` and optionally `classes`.

    Args:
        path: the folder or file.
        field: name of the argument that gave the path, such as "public"; for messages.

    Raises:
        InputError: nothing there, no images, unreadable images, mixed sizes or colour modes, or wrong types.
    """
    if not path.exists():
        raise InputError(field, "does not exist; give a folder of images or an .npz file", path)
    if path.is_dir():
        return _load_folder(path, field)
    if path.suffix != ".npz":
        raise InputError(field, "is neither a folder nor an .npz file", path)
    return _load_npz(path, field)


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


def _load_npz(path: Path, field: str) -> ImageSet:
    arrays: dict[str, NDArray[Any]] = {}
    try:
        # np.load leaves a damaged file open, so open it here
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            if "images" not in archive:
                found = ", ".join(archive) or "nothing"
                raise InputError(field, f"has no array 'images' (found: {found})", path)
            arrays = {name: archive[name] for name in ("images", "labels", "classes") if name in archive}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError, TypeError):
        raise InputError(field, "is damaged or not an .npz file; write it with numpy.savez", path) from None
    images = arrays["images"]
    if images.dtype != np.uint8:
        raise InputError(field, f"'images' is {images.dtype}, expected uint8 with values 0..255", path)
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    if not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise InputError(field, f"'images' has shape {images.shape}, expected (N, H, W) or (N, H, W, 3)", path)
    if 0 in images.shape:
        raise InputError(field, "has no images", path)
    if "labels" not in arrays:
        return ImageSet(images, None, (), str(path))
    labels = _check_labels(arrays["labels"], len(images), field, path)
    if "classes" in arrays:
        classes = tuple(str(name) for name in arrays["classes"].reshape(-1))
    else:
        classes = tuple(str(number) for number in range(int(labels.max()) + 1))
    if labels.min() < 0 or labels.max() >= len(classes):
        raise InputError(field, f"'labels' must lie in 0..{len(classes) - 1}: there are {len(classes)} classes", path)
    if len(set(classes)) < len(classes):
        raise InputError(field, "'classes' has a name twice", path)
    return ImageSet(images, labels, classes, str(path))


def _check_labels(labels: NDArray[Any], count: int, field: str, path: Path) -> NDArray[np.int64]:
    if labels.shape != (count,):
        raise InputError(field, f"'labels' has shape {labels.shape}, expected ({count},): one for each image", path)
    if labels.dtype.kind not in "iu":
        raise InputError(field, f"'labels' is {labels.dtype}, expected integers", path)
    return labels.astype(np.int64)


def _load_folder(path: Path, field: str) -> ImageSet:
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    loose = _image_files(path)
    if folders and loose:
        raise InputError(field, "has both images and sub-folders; use one sub-folder per class, or none", path)
    groups = [_image_files(folder) for folder in folders] if folders else [loose]
    for folder, group in zip(folders, groups, strict=False):
        if not group:
            raise InputError(field, f"the sub-folder '{folder.name}' has no images; fill or remove it", path)
    files = [file for group in groups for file in group]
    if not files:
        raise InputError(field, f"has no images ({', '.join(SUFFIXES)})", path)
    first = _read_image(files[0], field)
    images = np.empty((len(files), *first.shape), np.uint8)
    for number, file in enumerate(files):
        image = _read_image(file, field)
        if image.shape != first.shape:
            problem = f"{file.name} is {_describe(image)}, expected {_describe(first)} like the first image"
            raise InputError(field, f"{problem}; convert all images to one size and colour mode", path)
        images[number] = image
    if not folders:
        return ImageSet(images, None, (), str(path))
    labels = np.repeat(np.arange(len(groups), dtype=np.int64), [len(group) for group in groups])
    return ImageSet(images, labels, tuple(folder.name for folder in folders), str(path))


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _read_image(file: Path, field: str) -> NDArray[np.uint8]:
    try:
        with Image.open(file) as image:
            if image.mode.startswith("I;16") or image.mode in ("I", "F"):
                raise InputError(field, "has more than 8 bits per channel; convert it to 8-bit grey or RGB", file)
            return np.asarray(image.convert("L" if image.mode in GREY_MODES else "RGB"), np.uint8)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        raise InputError(field, "is not a readable image (damaged or truncated); repair or remove it", file) from None


def _describe(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[1]}x{image.shape[0]} {'grey' if image.ndim == 2 else 'RGB'}"
