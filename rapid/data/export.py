"""Writing generated images as an `.npz` file or a folder of PNGs with one sub-folder per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid.errors import InputError
from rapid.files import replacing
from rapid.pictures import encode_png


def check_target(path: Path) -> None:
    """Refuse an unusable target before any work is done.

    Raises:
        InputError: a suffix other than .npz, an .npz name that is a folder, or a folder that is a file or not empty.
    """
    if path.suffix == ".npz":
        if path.is_dir():
            raise InputError("out", "is a folder; choose another name", path)
    elif path.is_file() or path.suffix:
        raise InputError("out", "give a name that ends in .npz, or a folder", path)
    elif path.is_dir() and any(path.iterdir()):
        raise InputError("out", "the folder is not empty; choose another name", path)


def write_samples(
    path: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    text: Mapping[str, str] | None = None,
) -> None:
    """Write images and labels to `path`, which appears once it is complete.

    Args:
        path: an `.npz` file or a folder; see `check_target`.
        images: uint8 (N, H, W) or (N, H, W, 3).
        labels: int64 (N,), indices into `classes`; None if the images are unlabelled.
        classes: class names.
        text: text chunks of every PNG, such as `rapid.bundle.info.provenance`; not stored in an `.npz`.
    """
    with replacing(path) as target:
        if path.suffix == ".npz":
            arrays: dict[str, NDArray[np.generic]] = {"images": images}
            if labels is not None:
                arrays |= {"labels": labels, "classes": np.asarray(classes)}
            with target.open("wb") as stream:
                np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
            return
        target.mkdir()
        digits = len(str(len(images) - 1))
        for number, image in enumerate(images):
            folder = target
            if labels is not None:
                folder = target / classes[labels[number]].replace("/", "_")
                folder.mkdir(exist_ok=True)
            (folder / f"{number:0{digits}}.png").write_bytes(encode_png(image, text))
