"""No image and no label is lost without a word: what is not read is an error that says what to do."""

from __future__ import annotations

import io
import shutil
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests_sets import Made, as_parquet, as_tar, some, write_csv, write_lines

from rapid.data import load_images
from rapid.data.classes import class_folders
from rapid.data.export import write_samples
from rapid.errors import InputError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 4, 4), np.uint8)


def refused(path: Path, words: str, **how: str | None) -> None:
    """The set is refused in these words, and without names of files if they may not be shown."""
    with pytest.raises(InputError, match=words):
        load_images(path, "private", **how)
    with pytest.raises(InputError) as caught:
        load_images(path, "private", show_paths=False, **how)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ["train/cat/1.png", "train/dog/2.png", "test/3.png", "test/4.png"],
        ["cat/1.png", "dog/2.png", "dog/secret/3.png", "dog/4.png"],
        ["train/cat/1.png", "test/cat/2.png", "train/cat/secret/3.png", "test/cat/4.png"],
        ["train/cat/1.png", "test/cat/2.png", "secret/3.png", "secret/4.png"],
        ["secret/inner/1.png", "secret/inner/2.png", "other/3/3.png", "other/4/4.png"],
    ],
    ids=["an unlabelled split", "within a class", "within a split", "beside splits", "no others"],
)
def test_images_deeper_than_classes(tmp_path: Path, names: list[str]) -> None:
    some().write(tmp_path, names)
    refused(tmp_path, "has images deeper than one sub-folder per class")


def test_folders_of_programs_are_passed_over(tmp_path: Path) -> None:
    names = ["cat/1.png", "dog/2.png", "dog/@eaDir/3.png", "__MACOSX/cat/4.png"]
    some().write(tmp_path, names)
    assert [folder.name for folder in class_folders(tmp_path)] == ["cat", "dog"]
    assert len(load_images(tmp_path, "private")) == 2


@pytest.mark.parametrize("name", ["secret.heic", "secret.DCM", "secret.nii.gz"])
def test_images_of_other_formats(tmp_path: Path, name: str) -> None:
    some().write(tmp_path, ["cat/1.png", "dog/2.png", "dog/3.png", "dog/4.png"])
    (tmp_path / "cat" / name).touch()
    refused(tmp_path, "is of a format that is not read; convert it to PNG or JPEG")


def test_other_suffixes_of_the_same_formats(tmp_path: Path) -> None:
    for number, (kind, suffix) in enumerate({"JPEG": "jfif", "PPM": "pnm", "PNG": "PNG"}.items()):
        Image.fromarray(PIXELS[0]).save(tmp_path / f"{number}.{suffix}", format=kind)
    Image.fromarray(PIXELS[0] > 99).save(tmp_path / "3.pbm", format="PPM")
    assert len(load_images(tmp_path, "private")) == 4


@pytest.mark.parametrize("table", ["diagnoses.csv", "notes.jsonl"])
def test_a_table_beside_a_single_folder(tmp_path: Path, table: str) -> None:
    made = some()
    made.write(tmp_path / "images", made.names)
    (tmp_path / table).touch()
    refused(tmp_path, f"'{table}' lies beside the images and is not read")


def test_a_table_whose_column_is_not_known(tmp_path: Path) -> None:
    made = some()
    names = [f"images/{name}" for name in made.names]
    made.write(tmp_path, names)
    rows = [{"file_name": name, "diagnosis": kind} for name, kind in zip(names, "abab", strict=True)]
    write_csv(tmp_path / "metadata.csv", rows)
    refused(tmp_path, r"has no column 'label' \(found: diagnosis\)")
    assert load_images(tmp_path, "private", label_column="diagnosis").classes == ("a", "b")
    (tmp_path / "metadata.csv").unlink()
    write_csv(tmp_path / "Labels.CSV", [{"file_name": row["file_name"], "label": row["diagnosis"]} for row in rows])
    assert load_images(tmp_path, "private").classes == ("a", "b")


def test_two_sets_in_a_folder(tmp_path: Path) -> None:
    for number, write in enumerate((as_parquet, as_tar)):
        path = write(some(), tmp_path / str(number))
        folder = path if path.is_dir() else path.parent
        Image.fromarray(PIXELS[0]).save(folder / "preview.png")
        refused(folder, "lies beside the images and is not read; give its path|has both images and sub-folders")
        (folder / "assets").mkdir()
        (folder / "preview.png").rename(folder / "assets" / "preview.png")
        refused(folder, "lies beside the images and is not read; give its path")


@pytest.mark.parametrize("write", [as_parquet, as_tar])
def test_sets_that_lie_too_deep(tmp_path: Path, write: Callable[[Made, Path], Path]) -> None:
    path = write(some(), tmp_path / "made")
    deep = tmp_path / "set" / "default" / "secret"
    deep.mkdir(parents=True)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            shutil.move(file, deep / file.name)
    refused(tmp_path / "set", "has no images, but 'default/secret/.*' lies too deep to be read; give the path")
    assert len(load_images(deep, "private")) == 4


def test_a_folder_of_arrow_files(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("dataset_dict.json", "train/data-00000-of-00001.arrow", "train/state.json"):
        (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / "train"):
        refused(path, "as save_to_disk of datasets writes them, and these are not read; write each split as Parquet")


def test_labels_by_the_folders_of_a_tar(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(content, format="PNG")
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for name in ("secret/1.png", "dog/1.png"):
            member = tarfile.TarInfo(name)
            member.size = len(content.getvalue())
            archive.addfile(member, io.BytesIO(content.getvalue()))
    refused(tmp_path / "set.tar", "has samples in several folders and no labels")
    assert load_images(tmp_path / "set.tar", "private", label_column="none").labels is None


@pytest.mark.parametrize("name", ["label", "y", "targets"])
def test_labels_of_an_archive_under_another_name(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "set.npz", images=PIXELS, **{name: np.arange(3)})
    refused(tmp_path / "set.npz", f"the array '{name}' is not read: name the array of the labels by --label-column")
    assert load_images(tmp_path / "set.npz", "private", label_column=name).classes == ("0", "1", "2")
    assert load_images(tmp_path / "set.npz", "private", label_column="none").labels is None


@pytest.mark.parametrize("name", ["synthetic", "synthetic.npz", "synthetic.parquet"])
def test_names_with_blanks_come_back(tmp_path: Path, name: str) -> None:
    classes, labels = ("dog", "dog ", " dog"), np.arange(3)
    write_samples(tmp_path / name, PIXELS, labels, classes)
    found = load_images(tmp_path / name, "public", classes)
    assert found.labels is not None
    assert found.classes == classes
    order = np.argsort(found.labels)
    assert np.array_equal(found.labels[order], labels)
    assert np.array_equal(found.images[order], PIXELS)


def test_a_short_name_that_several_files_have(tmp_path: Path) -> None:
    Image.fromarray(PIXELS[0]).save(tmp_path / "secret.png")
    Image.fromarray(PIXELS[0]).save(tmp_path / "secret.jpg")
    write_csv(tmp_path / "table.csv", [{"image_id": "secret", "label": "a"}])
    refused(tmp_path / "table.csv", "names a file without its suffix, and there are several: 'secret'")
    write_csv(tmp_path / "table.csv", [{"image_id": "secret.png", "label": "a"}])
    assert np.array_equal(load_images(tmp_path / "table.csv", "private").images, PIXELS[:1])


def test_accents_of_two_kinds(tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, "\u00e9t\u00e9.png") for form in ("NFC", "NFD")]
    Image.fromarray(PIXELS[0]).save(tmp_path / names[1])
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": names[0], "label": "a"}])
    assert load_images(tmp_path, "private").classes == ("a",)


def test_a_table_written_by_excel(tmp_path: Path) -> None:
    Image.fromarray(PIXELS[0]).save(tmp_path / "1.png")
    (tmp_path / "metadata.csv").write_text("sep=;\r\nfile_name;label\r\n1.png;a\r\n")
    assert load_images(tmp_path, "private").classes == ("a",)


def test_a_number_written_in_two_ways(tmp_path: Path) -> None:
    for number in range(2):
        Image.fromarray(PIXELS[number]).save(tmp_path / f"{number}.png")
    write_csv(tmp_path / "metadata.csv", [{"file_name": "0.png", "label": "1"}, {"file_name": "1.png", "label": "01"}])
    refused(tmp_path, "labels write a number in several ways")
    assert load_images(tmp_path, "private", ("1", "01")).classes == ("1", "01")


def test_an_image_that_is_too_large(tmp_path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(tmp_path / "secret.png")
    refused(tmp_path, "has more pixels than are opened")


def test_a_negative_of_sixteen_bits(tmp_path: Path) -> None:
    wide = PIXELS[0].astype(np.uint16) * 257
    Image.fromarray(wide).save(tmp_path / "1.tif", tiffinfo={262: 0})
    found = load_images(tmp_path, "public").images[0]
    # Pillow writes the values as they are, and the tag says that 0 is white
    assert np.array_equal(found, 255 - PIXELS[0])
