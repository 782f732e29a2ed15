"""Writing generated images: an `.npz`, or a folder of PNGs with one sub-folder a class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rapid.errors import InputError
from rapid.files import replacing
from rapid.methods.rapid.generator import Samples
from rapid.pictures import encode_png


def check_target(path: Path) -> None:
    """Refuse a target that cannot be written, before anything is computed.

    Raises:
        InputError: a file of another kind, or a folder that is not empty.
    """
    if path.suffix == ".npz":
        if path.is_dir():
            raise InputError(f"--out {path}: is a folder; give another name")
    elif path.is_file() or path.suffix:
        raise InputError(f"--out {path}: give a name that ends in .npz, or a folder")
    elif path.is_dir() and any(path.iterdir()):
        raise InputError(f"--out {path}: the folder is not empty; give a new one")


def write_samples(
    path: Path, samples: Samples, classes: tuple[str, ...], text: Mapping[str, str] | None = None
) -> None:
    """Write images and labels to `path` (see `check_target`); appears when it is complete.

    `text` is put into each PNG: where the images come from; see `rapid.bundle.info.provenance`.
    """
    with replacing(path) as target:
        if path.suffix == ".npz":
            arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {"images": samples.images}
            if samples.labels is not None:
                arrays |= {"labels": samples.labels, "classes": np.asarray(classes)}
            with target.open("wb") as stream:
                np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
            return
        target.mkdir()
        digits = len(str(len(samples.images) - 1))
        for number, image in enumerate(samples.images):
            folder = target
            if samples.labels is not None:
                folder = target / classes[samples.labels[number]].replace("/", "_")
                folder.mkdir(exist_ok=True)
            (folder / f"{number:0{digits}}.png").write_bytes(encode_png(image, text))
