"""Every format holds the same set: written by other libraries, read as the images, labels and people that went in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from tests_sets import (
    NAMES,
    Made,
    as_binary_parquet,
    as_labels_beside,
    as_metadata_csv,
    as_metadata_lines,
    as_npz,
    as_packed_tar,
    as_parquet,
    as_tar,
    sets,
    some,
    write_csv,
    write_lines,
)

from rapid.data import ImageSet, load_images
from rapid.data.names import image_names
from rapid.data.units import PeopleFrom
from rapid.errors import InputError

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
    # as pandas writes whole numbers of a column that had gaps; 10 comes after 2
    whole = ("2.0", "10.0", "2.0", "1.0")
    write_csv(path, [{"file_name": name, "label": label} for name, label in zip(made.names, whole, strict=True)])
    found = load_images(tmp_path, "public")
    assert found.labels is not None
    assert (found.classes, found.labels.tolist()) == (tuple(map(str, range(11))), [2, 10, 2, 1])
    assert load_images(tmp_path, "public", ("1.0", "2.0", "10.0")).labels.tolist() == [1, 2, 1, 0]
    halves = ("2.5", "10.0", "2.5", "1.0")
    write_csv(path, [{"file_name": name, "label": label} for name, label in zip(made.names, halves, strict=True)])
    assert load_images(tmp_path, "public").classes == ("1.0", "10.0", "2.5")
    write_csv(path, [{"file_name": name, "label": label} for name, label in zip(made.names, (0, 3, 0, 1), strict=True)])
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


def test_splits_of_unlabelled_images_are_no_classes(tmp_path: Path) -> None:
    some().write(tmp_path, ["train/1.png", "train/2.png", "Test/3.png", "Test/4.png"])
    found = load_images(tmp_path, "public")
    assert (found.labels, found.classes, len(found)) == (None, (), 4)
    assert found.notes[-1] == "without labels: Test, train are taken for splits, not classes"
    assert load_images(tmp_path, "private", show_paths=False).labels is None
    assert image_names(tmp_path, 4) == ["Test/3.png", "Test/4.png", "train/1.png", "train/2.png"]
    # declared, they are classes
    assert load_images(tmp_path, "private", ("train", "Test")).labels.tolist() == [1, 1, 0, 0]
    # which of them have images matters not
    (tmp_path / "val").mkdir()
    assert load_images(tmp_path, "private").labels is None
    (tmp_path / "tram").mkdir()
    assert load_images(tmp_path, "private").classes == ("Test", "train", "tram", "val")


def test_without_a_split_to_train_on_names_are_classes(tmp_path: Path) -> None:
    some().write(tmp_path, ["dev/1.png", "dev/2.png", "test/3.png", "test/4.png"])
    assert load_images(tmp_path, "public").classes == ("dev", "test")


def test_tables_of_splits_of_unlabelled_images(tmp_path: Path) -> None:
    some().write(tmp_path, ["train/1.png", "train/2.png", "test/3.png", "test/4.png"])
    for split, names in (("train", ("1.png", "2.png")), ("test", ("3.png", "4.png"))):
        write_csv(tmp_path / split / "metadata.csv", [{"file_name": name, "diagnosis": "ill"} for name in names])
    with pytest.raises(InputError, match="has no column 'label'"):
        load_images(tmp_path, "private")
    assert load_images(tmp_path, "private", label_column="none").labels is None
    for split in ("train", "test"):
        (tmp_path / split / "metadata.csv").rename(tmp_path / split / "diagnoses.csv")
    with pytest.raises(InputError, match="lies beside the images and is not read"):
        load_images(tmp_path, "private")
    assert load_images(tmp_path, "private", label_column="none").labels is None


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
        "pip install pyarrow"
    )
