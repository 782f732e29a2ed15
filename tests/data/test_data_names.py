"""Names of images in lists of results: each stands for the image that `load_images` has at its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests_sets import some, write_csv, write_lines

from rapid.data import load_images
from rapid.data.export import write_samples
from rapid.data.names import image_names

WRITTEN = ("b/1.png", "a/3.png", "a/0.png", "b/2.png")
"""Files in the order of a table, which is not that of their names."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images with a table of their labels."""
    some().write(tmp_path / "set", WRITTEN)
    rows = [{"file_name": name, "label": name[0]} for name in WRITTEN]
    write_csv(tmp_path / "set" / "metadata.csv", rows)
    return tmp_path / "set"


def assert_named(path: Path, names: list[str], root: Path) -> None:
    """Check that the images of a set have these names, and are those of the files that are called so."""
    images = load_images(path, "data", label_column="none").images
    assert image_names(path, len(images)) == names
    for image, name in zip(images, names, strict=True):
        with Image.open(root / name) as file:
            np.testing.assert_array_equal(image, np.asarray(file))


def test_a_folder_with_a_table(folder: Path) -> None:
    assert_named(folder, list(WRITTEN), folder)


def test_a_table(folder: Path) -> None:
    assert_named(folder / "metadata.csv", list(WRITTEN), folder)


def test_names_are_those_of_the_table(folder: Path) -> None:
    """By them it is joined with the results."""
    names = [name.removesuffix(".png") for name in WRITTEN]
    (folder / "metadata.csv").unlink()
    write_lines(folder / "labels.jsonl", [{"image_id": name, "label": 0} for name in names])
    assert image_names(folder, 4) == names


def test_tables_of_splits(tmp_path: Path) -> None:
    made = some()
    made.write(tmp_path, ("train/1.png", "train/0.png", "test/1.png", "test/0.png"))
    for split in ("train", "test"):
        write_csv(tmp_path / split / "metadata.csv", [{"file_name": f"{name}.png"} for name in (1, 0)])
    assert_named(tmp_path, ["test/1.png", "test/0.png", "train/1.png", "train/0.png"], tmp_path)


def test_a_table_without_labels_beside_folders_of_classes(folder: Path) -> None:
    """The folders are read, and not the table."""
    write_csv(folder / "metadata.csv", [{"file_name": name, "age": "7"} for name in WRITTEN])
    assert_named(folder, sorted(WRITTEN), folder)


def test_what_generate_writes(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8), np.uint8)
    write_samples(tmp_path / "out", images, np.array([1, 0, 0, 1]), ("cat", "dog"))
    names = image_names(tmp_path / "out", 4)
    assert [name.partition("/")[0] for name in names] == ["dog", "cat", "cat", "dog"]
    assert_named(tmp_path / "out", names, tmp_path / "out")


def test_other_formats_have_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4), np.uint8))
    assert image_names(tmp_path / "a.npz", 3) == ["0", "1", "2"]
