"""Image sets in every format that is read, for tests."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})

NAMES = ("cat", "dog, black", "Émile")


class Made(NamedTuple):
    """A set as it is written down."""

    images: NDArray[np.uint8]
    labels: Sequence[int]
    people: Sequence[str]

    def png(self, number: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(self.images[number]).save(stream, "PNG")
        return stream.getvalue()

    def write(self, folder: Path, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.png(number))

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"file_name": name, "label": NAMES[label], "who": who}
            for name, label, who in zip(names, self.labels, self.people, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        return [f"{number:03}.png" for number in range(len(self.images))]


@st.composite
def sets(draw: st.DrawFn) -> Made:
    count = draw(st.integers(1, 9))
    shape = (count, draw(st.integers(1, 5)), draw(st.integers(1, 5)), *draw(st.sampled_from([(), (3,)])))
    images = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, shape, np.uint8)
    labels = draw(st.lists(st.integers(0, len(NAMES) - 1), min_size=count, max_size=count))
    people = draw(st.lists(st.sampled_from(["anna", "bo", "12"]), min_size=count, max_size=count))
    return Made(images, labels, people)


def write_csv(path: Path, rows: Sequence[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def as_metadata_csv(made: Made, folder: Path) -> Path:
    made.write(folder, made.names)
    write_csv(folder / "metadata.csv", made.rows(made.names))
    return folder


def as_metadata_lines(made: Made, folder: Path) -> Path:
    """In two splits, the second with its images in a folder of its own."""
    half = len(made.images) // 2
    names = [f"train/{name}" for name in made.names[:half]] + [f"test/more/{name}" for name in made.names[half:]]
    made.write(folder, names)
    for split, rows in (("train", made.rows(names)[:half]), ("test", made.rows(names)[half:])):
        if rows:
            inside = [row | {"file_name": row["file_name"].removeprefix(f"{split}/")} for row in rows]
            write_lines(folder / split / "metadata.jsonl", inside)
    return folder


def as_labels_beside(made: Made, folder: Path) -> Path:
    """Names without their suffix, semicolons, and images that the table leaves out."""
    made.write(folder / "pictures", made.names)
    (folder / "pictures" / "unused.png").write_bytes(made.png(0))
    rows = [
        {"image_id": row["file_name"].removesuffix(".png"), "who": row["who"], "dx": row["label"]}
        for row in made.rows(made.names)
    ]
    return write_csv(folder / "pictures.csv", rows, ";")


def as_parquet(made: Made, folder: Path) -> Path:
    """As Hugging Face writes it: structs, and a ClassLabel in the schema's metadata; in two files."""
    folder = folder / "data"
    folder.mkdir(parents=True)
    features = {"image": {"_type": "Image"}, "label": {"names": list(NAMES), "_type": "ClassLabel"}}
    table = pa.table(
        {
            "image": [{"bytes": made.png(number), "path": name} for number, name in enumerate(made.names)],
            "label": list(made.labels),
            "who": list(made.people),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    half = len(made.images) // 2
    parquet.write_table(table[:half], folder / "train-00000-of-00002.parquet")
    parquet.write_table(table[half:], folder / "train-00001-of-00002.parquet")
    return folder.parent


def as_binary_parquet(made: Made, folder: Path) -> Path:
    folder.mkdir(parents=True)
    pixels = [made.png(number) for number in range(len(made.images))]
    columns = {"caption": made.names, "picture": pixels, "kind": [NAMES[label] for label in made.labels]}
    parquet.write_table(pa.table(columns | {"who": list(made.people)}), folder / "set.parquet")
    return folder / "set.parquet"


def as_tar(made: Made, folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True)
    path = folder / ("set.tar.gz" if packed else "set.tar")
    with tarfile.open(path, "w:gz" if packed else "w") as archive:
        for number, row in enumerate(made.rows(made.names)):
            key = f"some.folder/{number:03}"
            content = {"who": row["who"]} if packed else {"who": row["who"], "label": row["label"]}
            files = [("json", json.dumps(content).encode()), ("PNG", made.png(number)), ("txt", b"a caption")]
            if packed:
                files.append(("cls", row["label"].encode()))
            for suffix, content in files:
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def as_packed_tar(made: Made, folder: Path) -> Path:
    return as_tar(made, folder, packed=True)


def as_npz(made: Made, folder: Path) -> Path:
    folder.mkdir(parents=True)
    np.savez(
        folder / "a.npz", images=made.images, labels=np.array(made.labels), classes=NAMES, who=np.array(made.people)
    )
    return folder / "a.npz"


def some(count: int = 4) -> Made:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), np.uint8)
    return Made(pixels, [number % 3 for number in range(count)], ["anna-smith", "bo"] * (count // 2))
