"""Writing generated images: a folder in the form of Hugging Face's `imagefolder`, parquet, `.npz`, or a picture."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid.data.origin import KEYWORD
from rapid.errors import InputError
from rapid.files import check_folder, check_name, replacing
from rapid.metadata import METADATA, SOFT_LABELS, metadata_line
from rapid.pictures import encode_png, labelled_grid

NPZ, PARQUET, PICTURE = ".npz", ".parquet", ".png"
FORMS = f"give a folder, or a name that ends in {NPZ}, {PARQUET} or {PICTURE} (one picture of all images)"
MOST_IN_PICTURE = 2_500
"""Of 256x256 pixels these are as large as Pillow opens without complaint."""
ROWS = 1_000
"""Images in a row group of a parquet file, which a reader holds in memory at a time."""
_NAME_BYTES = 200

Text = Mapping[str, str]


def check_target(path: Path, count: int | None = None) -> None:
    """Refuse an unusable target before any work is done.

    Args:
        path: see `write_samples`.
        count: number of images, if it is known.

    Raises:
        InputError: another suffix, a file that exists already, a file's name that is a folder, a folder that is a file
            or not empty, a place where nothing can be written, parquet without pyarrow, or more images than a picture
            can show.
    """
    path = Path(os.path.realpath(path))
    check_name(path, "out")
    if path == Path.cwd():
        raise InputError("out", "is the current folder; give a new one", path)
    if path.suffix in (NPZ, PARQUET, PICTURE):
        if path.is_dir():
            raise InputError("out", "is a folder; choose another name", path)
        if path.exists():
            raise InputError("out", "exists already; choose another name, or remove it first", path)
        if path.suffix == PARQUET and find_spec("pyarrow") is None:
            raise InputError("out", "needs pyarrow: pip install pyarrow; or give a folder or .npz", path)
        if path.suffix == PICTURE and (count or 0) > MOST_IN_PICTURE:
            problem = f"a picture shows at most {MOST_IN_PICTURE:,} images; give a folder, {NPZ} or {PARQUET}"
            raise InputError("out", problem, path)
    elif path.is_file() or path.suffix:
        raise InputError("out", FORMS, path)
    elif path.is_dir() and any(path.iterdir()):
        raise InputError("out", "the folder is not empty; choose another name", path)
    elif path.is_mount():
        raise InputError("out", "is a mount point, which cannot be replaced; give a new folder in it", path)
    check_folder(path.parent, "out", path)


def write_samples(
    path: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    text: Text | None = None,
    soft_labels: NDArray[np.float32] | None = None,
) -> None:
    """Write images and labels to `path`, which appears once it is complete.

    Its suffix selects the form:

    - none: a folder with one sub-folder per class, whose name is that of the class as far as a file system allows.
      `metadata.jsonl` has the path and the class of each image, as Hugging Face's `imagefolder` reads them. Unlabelled
      images lie in the folder itself, without metadata.
    - `.parquet`: columns `image`, a struct of `bytes` (a PNG) and `path`, and `label`, the class index. The schema's
      metadata name the features as Hugging Face's `datasets` does.
    - `.npz`: `images`, `labels`, `classes`, and `rapid`, the text of this keyword.
    - `.png`: one picture of all images, by class; see `rapid.pictures.labelled_grid`.

    Args:
        path: see `check_target`.
        images: uint8 (N, H, W) or (N, H, W, 3).
        labels: int64 (N,), indices into `classes`; None if the images are unlabelled.
        classes: class names.
        text: text chunks of every PNG, such as `rapid.bundle.info.provenance`, and metadata of a parquet file.
        soft_labels: probabilities of the classes, float32 (N, classes), as `soft_labels`: an array, a column of lists,
            or in `metadata.jsonl` an object with a number for each class. Not for a picture.

    Raises:
        InputError: something was put at `path` meanwhile; the images have another name, which the message tells.
    """
    # a link stays, and what it leads to is written
    path = Path(os.path.realpath(path))
    with replacing(path, new="out") as target:
        match path.suffix:
            case ".npz":
                _write_npz(target, images, labels, classes, text, soft_labels)
            case ".parquet":
                _write_parquet(target, images, labels, classes, text, soft_labels)
            case ".png":
                target.write_bytes(encode_png(labelled_grid(images, labels, classes), text))
            case _:
                _write_folder(target, images, labels, classes, text, soft_labels)


def _write_npz(
    target: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    text: Text | None,
    soft_labels: NDArray[np.float32] | None,
) -> None:
    arrays: dict[str, NDArray[np.generic]] = {"images": images}
    if labels is not None:
        arrays |= {"labels": labels, "classes": np.asarray(classes)}
    if soft_labels is not None:
        arrays[SOFT_LABELS] = soft_labels
    if text is not None and KEYWORD in text:
        arrays[KEYWORD] = np.asarray(text[KEYWORD])
    with target.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def _write_folder(
    target: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    text: Text | None,
    soft_labels: NDArray[np.float32] | None,
) -> None:
    target.mkdir()
    names = _file_names(len(images))
    if labels is None:
        for name, image in zip(names, images, strict=True):
            (target / name).write_bytes(encode_png(image, text))
        return
    folders = folder_names(classes)
    with (target / METADATA).open("w", encoding="utf-8") as metadata:
        for row, (name, image, label) in enumerate(zip(names, images, labels.tolist(), strict=True)):
            file = target / folders[label] / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(encode_png(image, text))
            chances = None if soft_labels is None else soft_labels[row]
            metadata.write(metadata_line(f"{folders[label]}/{name}", classes[label], classes, chances))


def _write_parquet(
    target: Path,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    text: Text | None,
    soft_labels: NDArray[np.float32] | None,
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    features: dict[str, Any] = {"image": {"_type": "Image"}}
    fields = [pa.field("image", pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())]))]
    if labels is not None:
        features["label"] = {"names": list(classes), "_type": "ClassLabel"}
        fields.append(pa.field("label", pa.int64()))
    if soft_labels is not None:
        features[SOFT_LABELS] = {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "Sequence"}
        fields.append(pa.field(SOFT_LABELS, pa.list_(pa.float32())))
    metadata = {"huggingface": json.dumps({"info": {"features": features}}), **(text or {})}
    schema = pa.schema(fields, metadata)
    names = list(_file_names(len(images)))
    # PNGs are compressed, and no two are equal
    with parquet.ParquetWriter(target, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, len(images), ROWS):
            part = slice(start, start + ROWS)
            pairs = zip(names[part], images[part], strict=True)
            columns: list[Any] = [
                pa.array([{"bytes": encode_png(image, text), "path": name} for name, image in pairs], fields[0].type)
            ]
            if labels is not None:
                columns.append(pa.array(labels[part]))
            if soft_labels is not None:
                columns.append(pa.array(list(soft_labels[part]), fields[-1].type))
            writer.write_batch(pa.record_batch(columns, schema=schema))


def folder_names(classes: Sequence[str]) -> list[str]:
    """Names of the classes as sub-folders: each another one, visible, and allowed by file systems."""
    taken, found = {METADATA}, []
    for name in classes:
        # readers skip hidden folders
        safe = re.sub(r"^\.|[/\\\x00-\x1f]", "_", name).encode()[:_NAME_BYTES].decode(errors="ignore") or "_"
        number, unique = 1, safe
        while unique in taken:
            number += 1
            unique = f"{safe}_{number}"
        taken.add(unique)
        found.append(unique)
    return found


def _file_names(count: int) -> Iterator[str]:
    digits = len(str(count - 1))
    return (f"{number:0{digits}}.png" for number in range(count))
