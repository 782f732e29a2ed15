"""Parquet files with the bytes of an image in each row, as Hugging Face writes them.

The images are a column of structs {bytes, path} or of binary values; labels and people are columns beside it. Names of
classes come from the ClassLabel in the schema's metadata, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid.data.classes import class_folders
from rapid.data.readers.columns import check_people, label_column
from rapid.data.readers.decode import Encoded, decode
from rapid.data.readers.labels import from_values, people_of
from rapid.data.readers.soft_labels import NO_ORDER, as_rows, read_soft_labels
from rapid.data.readers.source import Records, Source
from rapid.data.readers.suffixes import PARQUET
from rapid.errors import DENIED, InputError
from rapid.metadata import SOFT_LABELS
from rapid.parsing import parse_json

IMAGES = ("image", "img", "images", "png", "jpg")
"""Names of the column of images, where several columns could be it."""
ROWS = 256
"""Rows that are read at a time."""
IMAGE_ROWS = 32
"""The same where images are read: photographs are large."""
BUFFER = 1 << 20
"""Bytes that are read at a time from a column."""
OTHERS = "the Parquet files {}; give one of them, or files that were written in the same way"
DAMAGED = "is damaged or not a Parquet file"


def has_tables(path: Path) -> bool:
    """Whether the path is a Parquet file, or a folder with some in it or in its sub-folder `data`."""
    return path.suffix.lower() == PARQUET if path.is_file() else path.is_dir() and bool(_parts(path))


def read_table(source: Source) -> Records:
    """Read Parquet files; those of a folder are the parts of one set, in the order of their names.

    Raises:
        InputError: see `load_images`; or pyarrow is not installed.
    """
    parquet = _pyarrow(source)
    paths = [source.path] if source.path.is_file() else _parts(source.path)
    schemas = [_opened(parquet, path, source).schema_arrow for path in paths]
    first = schemas[0]
    if any(schema.names != first.names for schema in schemas):
        raise source.error(OTHERS.format("have different columns"))
    if len(set(first.names)) < len(first.names):
        raise source.error("has two columns of the same name; rename one")
    column = _image_column(first, source)
    if not all(_holds_images(schema.field(column).type) for schema in schemas):
        raise source.error(OTHERS.format("have columns of different types"))
    others = [name for name in first.names if name != column]
    classes, *more = [_classes(schema, others, source) for schema in schemas]
    if any(one != classes for one in more):
        raise source.error(OTHERS.format("number their classes differently"))
    people, label = check_people(others, source), label_column(others, source, classes)
    soft = SOFT_LABELS if source.soft_labels and SOFT_LABELS in others else None
    small: dict[str, list[Any]] = {name: [] for name in (label, people) if name is not None}
    chances: list[NDArray[np.float32]] = []
    for path in paths:
        for batch in _batches(parquet, path, [*small, *([] if soft is None else [soft])], source):
            for name, values in small.items():
                values.extend(_values(batch.column(name), path, source))
            if soft is not None and len(batch):
                chances.append(as_rows(_values(batch.column(soft), path, source), source))
    if not sum(_opened(parquet, path, source).metadata.num_rows for path in paths):
        raise source.error("has no images")
    labels = None if label is None else from_values(small[label], classes.get(label), source, called=label, typed=True)
    units = None if people is None else people_of(small[people], people)
    if soft is not None and label is not None and label not in classes and isinstance(small[label][0], str):
        raise source.error(NO_ORDER)
    chosen = None if soft is None else read_soft_labels(chances, labels, source)

    def encoded() -> Iterator[Encoded]:
        for path in paths:
            row = 0
            for batch in _batches(parquet, path, [column], source, IMAGE_ROWS):
                for content in _values(_bytes(batch.column(column)), path, source):
                    if content is None:
                        problem = "has no bytes of an image; embed the images in the file"
                        raise source.error(f"a row {problem}", f"row {row} {problem}", path)
                    yield Encoded(f"{path} row {row}", content)
                    row += 1

    found = decode(encoded, source)
    if len(paths) > 1:
        found = found._replace(notes=(*found.notes, f"read from {len(paths)} Parquet files"))
    return found._replace(labels=labels, units=units, soft_labels=chosen)


def _pyarrow(source: Source) -> ModuleType:
    try:
        from pyarrow import parquet
    except ImportError:
        problem = "is Parquet, which needs pyarrow; install it by: pip install pyarrow"
        raise InputError(source.field, problem, source.path) from None
    return parquet  # type: ignore[no-any-return]


def _parts(path: Path) -> list[Path]:
    inner = [folder for folder in class_folders(path) if folder.name == "data"]
    return sorted(file for folder in (path, *inner) for file in folder.iterdir() if _is_part(file.name))


def _is_part(name: str) -> bool:
    return name.lower().endswith(PARQUET) and not name.startswith(".")


def _opened(parquet: ModuleType, path: Path, source: Source) -> Any:
    try:
        # without reading ahead: a part can be larger than memory
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER)
    except MemoryError:
        raise
    except PermissionError:
        raise source.error(f"a file {DENIED}", DENIED, path) from None
    except Exception:  # pyarrow raises errors of several kinds, whose messages hold what is in the file
        raise source.error(f"a file {DAMAGED}", DAMAGED, path) from None


def _values(column: Any, path: Path, source: Source) -> list[Any]:
    """The values of a column of a batch, as Python has them."""
    try:
        found: list[Any] = column.to_pylist()
    except MemoryError:
        raise
    except Exception:  # as above: of text that is not UTF-8, and of times that Python does not have
        raise source.error(f"a file {DAMAGED}", DAMAGED, path) from None
    return found


def _bytes(column: Any) -> Any:
    """The encoded images of a column: of structs their bytes alone, as the rest is not read."""
    names = [field.name for field in column.type] if str(column.type).startswith("struct") else []
    return column.field("bytes") if "bytes" in names else column


def _batches(parquet: ModuleType, path: Path, columns: list[str], source: Source, rows: int = ROWS) -> Iterator[Any]:
    """The rows of some columns, in parts."""
    if not columns:
        return
    batches = _opened(parquet, path, source).iter_batches(batch_size=rows, columns=columns, use_threads=False)
    while True:
        try:
            batch = next(batches, None)
        except MemoryError:
            raise
        except Exception:  # as above
            raise source.error(f"a file {DAMAGED}", DAMAGED, path) from None
        if batch is None:
            return
        yield batch


def _image_column(schema: Any, source: Source) -> str:
    found = [field.name for field in schema if _holds_images(field.type)]
    named = [name for name in IMAGES if name in found]
    if len(found) == 1:
        return str(found[0])
    if named:
        return named[0]
    problem = "needs a column 'image' with the bytes of images: binary, or a struct {bytes, path}"
    raise source.error(problem, f"{problem} (found: {', '.join(schema.names) or 'nothing'})")


def _holds_images(kind: Any) -> bool:
    """Whether a column of this type can hold images."""
    if str(kind).startswith("struct<"):
        return any(part.name == "bytes" and _holds_images(part.type) for part in kind)
    return str(kind) in ("binary", "large_binary")


def _classes(schema: Any, columns: Sequence[str], source: Source) -> dict[str, tuple[str, ...]]:
    """Names of the classes of each column that has some."""
    features = _features(schema)
    try:
        return {name: one for name in columns if (one := _class_names(features.get(name))) is not None}
    except ValueError:
        raise source.error("has a ClassLabel whose numbers are none; correct the features in its metadata") from None


def _features(schema: Any) -> Mapping[str, Any]:
    """Hugging Face's description of the columns, by name; empty without one."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Names of a ClassLabel; None for another feature.

    Raises:
        ValueError: they are numbered by something else than numbers.
    """
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    if isinstance(names, dict):
        # as cards write them: {"0": "cat", "1": "dog"}
        names = [names[key] for key in sorted(names, key=int)]
    return tuple(map(str, names)) if isinstance(names, list) and names else None
