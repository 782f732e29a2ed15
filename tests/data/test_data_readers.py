"""Every format holds the same set: written by other libraries, read as the images, labels and people that went in."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

from rapid.data import ImageSet, load_images
from rapid.data.units import PeopleFrom
from rapid.errors import InputError

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


FORMATS: dict[Callable[[Made, Path], Path], str | None] = {
    as_metadata_csv: None, as_metadata_lines: None, as_labels_beside: "dx", as_parquet: None,
    as_binary_parquet: "kind", as_tar: None, as_packed_tar: None, as_npz: None,
}  # fmt: skip
"""With the column of the labels, where it has to be named."""


def contents(found: ImageSet) -> list[tuple[bytes, str, frozenset[bytes]]]:
    """Each image with the name of its class and all images of its person; the order does not matter."""
    assert found.labels is not None
    assert found.units is not None
    raw = [image.tobytes() for image in found.images]
    of_person = [frozenset(raw[other] for other in np.flatnonzero(found.units == unit)) for unit in found.units]
    return sorted(
        (zip(raw, [found.classes[label] for label in found.labels], of_person, strict=True)),
        key=lambda one: (one[0], one[1], sorted(one[2])),
    )


@settings(max_examples=8, deadline=None)
@given(sets())
def test_all_formats_hold_the_same_set(made: Made) -> None:
    wanted = contents(ImageSet(made.images, np.array(made.labels), NAMES, units=np.unique(
        np.array(made.people), return_inverse=True
    )[1]))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for write, label in FORMATS.items():
            path = write(made, Path(folder) / write.__name__)
            how = {"people": PeopleFrom("who"), "label_column": label, "show_paths": False}
            found = load_images(path, "private", **how)
            assert contents(found) == wanted, write.__name__
            assert found.images.dtype == np.uint8
            # names of a ClassLabel and of an .npz are declared; those that only labels have are not
            assert found.declared == (write in (as_parquet, as_npz)), write.__name__
            declared = load_images(path, "private", (NAMES[2], "more", NAMES[1], NAMES[0]), **how)
            assert contents(declared) == wanted, write.__name__
            assert declared.declared
            assert declared.classes == (NAMES[2], "more", NAMES[1], NAMES[0])
            unlabelled = load_images(path, "private", label_column="none")
            assert (unlabelled.labels, unlabelled.units, len(unlabelled)) == (None, None, len(made.images))


def some(count: int = 4) -> Made:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), np.uint8)
    return Made(pixels, [number % 3 for number in range(count)], ["anna-smith", "bo"] * (count // 2))


def test_labels_that_are_numbers(tmp_path: Path) -> None:
    made = some()
    made.write(tmp_path, made.names)
    path = tmp_path / "metadata.csv"
    write_csv(path, [{"file_name": name, "label": label} for name, label in zip(made.names, (0, 3, 0, 1), strict=True)])
    found = load_images(tmp_path, "public")
    assert found.labels is not None
    assert (found.classes, found.labels.tolist(), found.declared) == (tuple("0123"), [0, 3, 0, 1], False)
    # numbers of the declared classes; or their names, where they are those
    assert load_images(tmp_path, "public", ("a", "b", "c", "d")).labels.tolist() == [0, 3, 0, 1]
    assert load_images(tmp_path, "public", ("3", "1", "0")).labels.tolist() == [2, 0, 2, 1]
    with pytest.raises(InputError, match=r"must lie in 0\.\.1"):
        load_images(tmp_path, "public", ("a", "b"))
    lines = [{"file_name": name, "label": 70_000} for name in made.names]
    path.unlink()
    write_lines(tmp_path / "metadata.jsonl", lines)
    with pytest.raises(InputError, match="declare the classes"):
        load_images(tmp_path, "public")


def test_splits_of_class_folders_are_one_set(tmp_path: Path) -> None:
    made = some()
    made.write(tmp_path, ["train/cat/1.png", "train/dog/2.png", "test/dog/3.png", "test/dog/4.png"])
    (tmp_path / "train" / "empty").mkdir()
    found = load_images(tmp_path, "public")
    assert found.labels is not None
    assert found.classes == ("cat", "dog", "empty")
    assert sorted(found.labels.tolist()) == [0, 1, 1, 1]
    # classes may have such names, too
    made.write(tmp_path / "vehicles", ["train/1.png", "train/2.png", "test/3.png", "test/4.png"])
    assert load_images(tmp_path / "vehicles", "public").classes == ("test", "train")


def test_what_lies_beside_class_folders_changes_nothing(tmp_path: Path) -> None:
    made = some()
    made.write(tmp_path, ["cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png"])
    write_csv(tmp_path / "metadata.csv", [{"file_name": "cat/1.png", "caption": "a cat"}])
    as_tar(made, tmp_path / "tar")
    shutil.move(tmp_path / "tar" / "set.tar", tmp_path)
    (tmp_path / "tar").rmdir()
    assert load_images(tmp_path, "public").classes == ("cat", "dog")


def test_a_format_without_pyarrow(tmp_path: Path) -> None:
    path = as_binary_parquet(some(), tmp_path / "p")
    code = (
        "import sys; sys.modules['pyarrow'] = None; from pathlib import Path; from rapid.data.readers.source import "
        "Source; from rapid.data.readers.table import read_table; read_table(Source(Path(sys.argv[1]), 'private'))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()[-1]
    assert said == f"rapid.errors.InputError: private {path}: is Parquet, which needs pyarrow; install it by: " + (
        "pip install 'rapid[parquet]'"
    )


def gone(path: Path) -> None:
    (path / "001.png").unlink()


def unnamed(path: Path) -> None:
    shutil.copy(path / "001.png", path / "anna-smith.png")


def edited(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """A change of the rows of metadata.csv."""

    def spoil(path: Path) -> None:
        with (path / "metadata.csv").open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        write_csv(path / "metadata.csv", list(change(rows) or rows))  # type: ignore[call-overload]

    return spoil


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return edited(lambda rows: [{new if name == old else name: value for name, value in row.items()} for row in rows])


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / "metadata.csv").write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "hidden", "shown"),
    [
        (gone, "a table names a file that is not there", "names a file that is not there: '001.png'"),
        (unnamed, "an image has no line in a table of labels", "anna-smith.png: has no line"),
        (edited(lambda rows: rows[2].update(label=" ")), "some images have no label", "some images have no label"),
        (edited(lambda rows: rows[2].update(file_name="")), "a line of a table has no file name", "no file name"),
        (edited(lambda rows: rows[2].update(file_name="../x.png")), "a file outside of its folder", "'../x.png'"),
        (edited(lambda rows: rows[2].update(file_name="/x.png")), "a file outside of its folder", "'/x.png'"),
        (edited(lambda rows: rows[2].update(file_name="001.png")), "a table names a file twice", "names a file twice"),
        (edited(lambda rows: [row | {"class": "a"} for row in rows]), "several columns that may be", "(label, class)"),
        (renamed("label", "dx"), "has no column 'label'", "(found: dx, who)"),
        (renamed("file_name", "where"), "one column of file names, 'file_name'", "(found: where, label, who)"),
        (text(b"file_name,label\n000.png,a,anna-smith\n"), "a table of labels cannot be read", "header line"),
        (text(b"\xff\xfe\x00"), "a table of labels cannot be read", "header line"),
        (text(b""), "one column of file names", "found: nothing"),
        (text(b"file_name,label\n"), "an image has no line", "has no line"),
        (text(b"file_name,label\n000.png\n"), "an image has no line", "has no line"),
    ],
)
def test_bad_tables(tmp_path: Path, spoil: Callable[[Path], object], hidden: str, shown: str) -> None:
    path = as_metadata_csv(some(), tmp_path / "set")
    spoil(path)
    with pytest.raises(InputError) as told:
        load_images(path, "private")
    with pytest.raises(InputError) as kept:
        load_images(path, "private", show_paths=False)
    assert shown in str(told.value)
    assert hidden in str(kept.value)
    for error in (told, kept):
        assert error.value.exit_code == 2
        assert "\n" not in str(error.value)
    private = str(kept.value).replace(str(tmp_path), "")
    assert not [word for word in ("anna", ".png", "dx", "class'", "where") if word in private]


def spoilt_parquet(tmp_path: Path, **columns: Any) -> Path:
    made = some()
    own = {"image": [made.png(number) for number in range(4)], "label": list(made.labels)}
    parquet.write_table(pa.table(own | columns), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0, 1, None, 2]}, "some images have no label"),
        ({"label": [0, 1, -1, 2]}, "must be at least 0"),
        ({"label": [0.0, 1.0, 2.0, 1.0]}, "whole numbers or names"),
        ({"image": ["a", "b", "c", "d"]}, "needs a column 'image'"),
        ({"image": [b"a", b"b", b"c", b"d"]}, "is not a readable image"),
        ({"image": pa.array([{"bytes": None, "path": "anna.png"}] * 4, STRUCT)}, "has no bytes of an image"),
        ({"who": [None, "a", "b", "c"]}, "has an empty entry"),
        ({"who": [0.5, 1.5, 1.5, 1.5]}, "must hold strings or integers"),
        ({"whose": ["a", "a", "b", "c"]}, "is not a column of --private"),
    ],
)
def test_bad_parquet(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    path = spoilt_parquet(tmp_path, **columns)
    people = PeopleFrom("who") if {"who", "whose"} & set(columns) else None
    with pytest.raises(InputError, match=words) as caught:
        load_images(path, "private", show_paths=False, people=people)
    assert "anna" not in str(caught.value)


def test_damaged_files_say_nothing_of_their_content(tmp_path: Path) -> None:
    table, tar = as_binary_parquet(some(), tmp_path / "p"), as_tar(some(), tmp_path / "t")
    for path in (table, tar):
        good = path.read_bytes()
        for content in (b"", good[: len(good) // 2 + 7], b"anna-smith" * 100):
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"damaged or not|readable image|exactly one image") as caught:
                load_images(path, "private", show_paths=False, label_column="none")
            assert "smith" not in str(caught.value)


def test_a_tar_with_samples_that_are_not_one_image(tmp_path: Path) -> None:
    for number, names in enumerate((("a.png", "a.jpg"), ("a.cls",))):
        path = tmp_path / f"{number}.tar"
        with tarfile.open(path, "w") as archive:
            for name in names:
                content = some().png(0)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        with pytest.raises(InputError, match="a sample needs exactly one image"):
            load_images(path, "private", show_paths=False)


def test_arguments_of_other_formats(tmp_path: Path) -> None:
    made = some()
    table, folder = as_binary_parquet(made, tmp_path / "p"), tmp_path / "folder"
    made.write(folder, made.names)
    for path, how, field in (
        (table, {"people": PeopleFrom()}, "unit_folders"),
        (folder, {"people": PeopleFrom("who")}, "unit_column"),
        (folder, {"label_column": "kind"}, "label_column"),
        (table, {"label_column": "missing"}, "label_column"),
        (as_npz(made, tmp_path / "n"), {"label_column": "missing"}, "label_column"),
    ):
        with pytest.raises(InputError) as caught:
            load_images(path, "private", **how)
        assert caught.value.field == field
