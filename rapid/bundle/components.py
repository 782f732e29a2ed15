"""Components of a bundle: objects that can save themselves to a folder and be loaded from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rapid.errors import DENIED, InputError
from rapid.files import content_hash, hashed_files, replacing
from rapid.parsing import parse_json

MANIFEST = "manifest.json"
"""If a component has this file, only the file is hashed: it holds the hashes of the other files."""


class Component(Protocol):
    """A part of a model. Component classes also have `load(folder)`."""

    def save(self, folder: Path) -> None:
        """Write all files into `folder`, which is new or empty."""


@dataclass(frozen=True)
class StoredComponent:
    """A component that is stored in another bundle.

    Attributes:
        path: its folder.
        kind: module and name of its class.
    """

    path: Path
    kind: tuple[str, str]

    def save(self, folder: Path) -> None:
        """Hard-link or copy what the component's hash covers: bundles are never changed in place.

        Raises:
            InputError: its manifest is damaged.
        """
        copy_component(self.path, folder, _link_or_copy)


class Thumbnails:
    """Thumbnails of all public images, with which `train-private` finds private images among them.

    Args:
        rows: uint8 (M, 256), see `rapid.data.thumbnails`.
    """

    FILE = "thumbnails.npy"

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self.rows = rows

    def save(self, folder: Path) -> None:
        """Write `thumbnails.npy`."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / self.FILE, self.rows)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load them, memory-mapped.

        Raises:
            InputError: missing or damaged.
        """
        try:
            return cls(np.load(folder / cls.FILE, mmap_mode="r"))
        except (OSError, ValueError):
            raise InputError("", f"{folder / cls.FILE} is missing or damaged; copy the bundle again") from None


def kind_of(component: Component) -> tuple[str, str]:
    """Module and name of a component's class, as in `model_index.json`."""
    if isinstance(component, StoredComponent):
        return component.kind
    return type(component).__module__, type(component).__qualname__


def save_component(component: Component, folder: Path) -> None:
    """Write a component to the new folder, which appears when it is complete."""
    with replacing(folder) as target:
        component.save(target)


def component_hash(folder: Path) -> str:
    """sha256 (hex) of a component: of its manifest, if it has one, or else of all its files."""
    manifest = folder / MANIFEST
    return content_hash(manifest if manifest.is_file() else folder)


def copy_component(source: Path, target: Path, copy_file: Callable[[Path, Path], object]) -> None:
    """Copy what a component's hash covers: not hidden files, nor others than those that its manifest names.

    Its folders keep their times and rights.

    Args:
        source: its folder.
        target: a folder that is made where it is missing.
        copy_file: copies a file (first) to a new one (second).

    Raises:
        InputError: its manifest is damaged.
    """
    manifest = source / MANIFEST
    if manifest.is_file():
        names = [MANIFEST, *listed_files(manifest)]
    else:
        names = [path.relative_to(source).as_posix() for path in hashed_files(source)]
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(source / name, target / name)
    # times, as those of files that are linked
    for folder in {Path(), *(parent for name in names for parent in Path(name).parents)}:
        shutil.copystat(source / folder, target / folder)


def listed_files(manifest: Path) -> dict[str, str]:
    """Hash of each file that the manifest of a component names.

    Raises:
        InputError: the manifest is damaged, or names files outside of its folder.
    """
    files = read_json(manifest, "").get("files", {})
    if not isinstance(files, dict) or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise InputError("", "is damaged; copy the bundle again", manifest)
    return files


def read_json(path: Path, field: str) -> dict[str, Any]:
    """The object in a file of a bundle.

    Args:
        path: of the file.
        field: the argument that named the bundle, for messages.

    Raises:
        InputError: missing, damaged, or no object.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise InputError(field, DENIED, path) from None
    except (OSError, ValueError):
        raise InputError(field, "is missing or damaged; copy the bundle again", path) from None
    if not isinstance(content, dict):
        raise InputError(field, "is damaged; copy the bundle again", path)
    return content


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        # in a cache of the Hugging Face Hub files are links, which would lead nowhere from here
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
