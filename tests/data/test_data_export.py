"""Generated images as a folder, parquet, `.npz` and a picture: what other readers find in them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from rapid.data import load_images
from rapid.data.export import MOST_IN_PICTURE, ROWS, check_target, folder_names, write_samples
from rapid.errors import InputError
from rapid.pictures import grid, labelled_grid

RNG = np.random.default_rng(0)
CLASSES = ("cat", "a/b", "a_b", "नमस्ते", ".dot")
LABELS = np.array([2, 0, 1, 0, 4, 3, 0])
TEXT = {"Software": "rapid", "rapid": '{"synthetic": true, "model": "ü"}'}


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("shape", [(5, 4), (4, 4, 3)])
def test_folder(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = pixels(len(LABELS), *shape)
    write_samples(tmp_path / "out", images, LABELS, CLASSES, TEXT)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text("utf-8").splitlines()]
    assert [line["label"] for line in lines] == [CLASSES[label] for label in LABELS]
    assert lines[0] == {"file_name": "a_b_2/0.png", "label": "a_b"}
    for line, image in zip(lines, images, strict=True):
        with Image.open(tmp_path / "out" / line["file_name"]) as found:
            assert (np.asarray(found) == image).all()
            assert found.text == TEXT  # type: ignore[attr-defined]
    # nothing else lies there, and no two classes share a folder
    assert len(list((tmp_path / "out").rglob("*.png"))) == len(images)
    assert len({line["file_name"].split("/")[0] for line in lines}) == len(CLASSES)


def test_folder_is_read_back_as_it_was(tmp_path: Path) -> None:
    """By its metadata.jsonl, so that order and names of classes are kept."""
    images = pixels(12, 4, 4)
    labels = np.arange(12) % 3
    write_samples(tmp_path / "out", images, labels, ("x", "y/1", "z"))
    found = load_images(tmp_path / "out", "public")
    assert found.classes == ("x", "y/1", "z")
    assert found.labels is not None
    assert (found.labels == labels).all()
    assert (found.images == images).all()


def test_unlabelled_folder(tmp_path: Path) -> None:
    images = pixels(3, 4, 4)
    write_samples(tmp_path / "out", images, None, ())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.png", "1.png", "2.png"]
    assert (load_images(tmp_path / "out", "public").images == images).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=300), unique=True))
def test_folder_names_are_distinct_and_safe(classes: list[str]) -> None:
    names = folder_names(classes)
    assert len(set(names)) == len(classes)
    for name in names:
        assert name
        assert not name.startswith(".")
        assert name != "metadata.jsonl"
        assert not set(name) & set("/\\\0\n")
        assert len(name.encode()) <= 255


@pytest.mark.parametrize("shape", [(5, 4), (4, 4, 3)])
def test_parquet(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = pixels(len(LABELS), *shape)
    write_samples(tmp_path / "out.parquet", images, LABELS, CLASSES, TEXT)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("image").type) == "struct<bytes: binary, path: string>"
    assert table["label"].to_pylist() == LABELS.tolist()
    for number, (row, image) in enumerate(zip(table["image"].to_pylist(), images, strict=True)):
        assert row["path"] == f"{number}.png"
        with Image.open(io.BytesIO(row["bytes"])) as found:
            assert (np.asarray(found) == image).all()
    metadata = table.schema.metadata
    assert metadata is not None
    assert json.loads(metadata[b"huggingface"]) == {
        "info": {"features": {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}}
    }
    assert metadata[b"rapid"].decode() == TEXT["rapid"]


def test_parquet_of_many_unlabelled_images_has_row_groups(tmp_path: Path) -> None:
    images = pixels(ROWS + 7, 1, 1)
    write_samples(tmp_path / "out.parquet", images, None, ())
    found = parquet.ParquetFile(tmp_path / "out.parquet")
    assert [found.metadata.row_group(part).num_rows for part in range(2)] == [ROWS, 7]
    assert found.schema_arrow.names == ["image"]
    (last,) = found.read_row_group(1)["image"].to_pylist()[-1:]
    assert last["path"] == "1006.png"
    with Image.open(io.BytesIO(last["bytes"])) as image:
        assert (np.asarray(image) == images[-1]).all()


def test_npz(tmp_path: Path) -> None:
    images = pixels(len(LABELS), 4, 4, 3)
    write_samples(tmp_path / "out.npz", images, LABELS, CLASSES, TEXT)
    with np.load(tmp_path / "out.npz") as found:
        assert (found["images"] == images).all()
        assert found["labels"].tolist() == LABELS.tolist()
        assert found["classes"].tolist() == list(CLASSES)
        assert found["rapid"].item() == TEXT["rapid"]
    write_samples(tmp_path / "plain.npz", images, None, ())
    with np.load(tmp_path / "plain.npz") as found:
        assert found.files == ["images"]


@pytest.mark.parametrize("shape", [(32, 32), (32, 32, 3), (100, 90)])
def test_picture_has_every_image_beside_its_class(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = pixels(len(LABELS), *shape)
    write_samples(tmp_path / "out.png", images, LABELS, CLASSES, TEXT)
    with Image.open(tmp_path / "out.png") as found:
        sheet = np.asarray(found)
        assert found.text == TEXT  # type: ignore[attr-defined]
    scale = max(1, 64 // max(shape[:2]))
    rows = []
    for image in images:
        large = np.kron(image, np.ones((scale, scale, *[1] * (image.ndim - 2)), np.uint8))
        large = large if large.ndim == 3 else np.repeat(large[..., None], 3, 2)
        rows.append(place_of(sheet, large)[0])
    order = np.argsort(LABELS, kind="stable")
    assert np.all(np.diff(np.array(rows)[order]) >= 0)
    assert len(set(rows)) == len(CLASSES)


def place_of(sheet: np.ndarray, image: np.ndarray) -> tuple[int, int]:
    """Where `image` lies in `sheet`."""
    (corners,) = (np.argwhere((sheet == image[0, 0]).all(-1)),)
    for row, column in corners.tolist():
        part = sheet[row : row + image.shape[0], column : column + image.shape[1]]
        if part.shape == image.shape and (part == image).all():
            return row, column
    raise AssertionError("not in the picture")


def test_picture_of_one_class_wraps_and_names_of_any_length_fit() -> None:
    images = pixels(100, 16, 16)
    sheet = labelled_grid(images, np.zeros(100, np.int64), ("two\nlines " + "x" * 500,))
    assert sheet.shape[0] < 1.2 * 10 * 68
    assert sheet.shape[1] < 10 * 68 + 500
    # without labels there is no caption
    assert (labelled_grid(images, None, (), side=16) == grid(images)).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("out.jpg", r"give a folder, or a name that ends in \.npz, \.parquet or \.png"),
        ("file", "give a folder"),
        ("full", "not empty"),
        ("file/deep/new", "file is not a folder; choose another name"),
        ("file/new.npz", "file is not a folder; choose another name"),
        # where not even root can
        ("/proc/new.npz", "nothing can be written in /proc"),
        ("folder.npz", "is a folder"),
        ("folder.parquet", "is a folder"),
        ("folder.png", "is a folder"),
    ],
)
def test_unusable_targets(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("mine")
    for suffix in ("npz", "parquet", "png"):
        (tmp_path / f"folder.{suffix}").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=words) as caught:
        check_target(tmp_path / name)
    assert caught.value.field == "out"


@pytest.mark.parametrize("name", ["out", "out.npz", "out.png"])
def test_what_was_put_there_meanwhile_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    check_target(path)
    if path.suffix:
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    (tmp_path / f"out-2{path.suffix}").write_text("mine")
    with pytest.raises(InputError, match=f"the result is in .*out-3{path.suffix}$") as caught:
        write_samples(path, np.zeros((2, 3, 3), np.uint8), np.zeros(2, np.int64), ("a",))
    assert caught.value.field == "out"
    assert (path if path.suffix else path / "mine").read_text() == "mine"
    assert {one.name for one in tmp_path.iterdir()} == {name, f"out-2{path.suffix}", f"out-3{path.suffix}"}


def test_parquet_without_pyarrow_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow: pip install pyarrow"):
        check_target(tmp_path / "out.parquet")


def test_a_picture_of_too_many(tmp_path: Path) -> None:
    check_target(tmp_path / "out.png", MOST_IN_PICTURE)
    check_target(tmp_path / "out.npz", MOST_IN_PICTURE + 1)
    with pytest.raises(InputError, match="at most 2,500 images"):
        check_target(tmp_path / "out.png", MOST_IN_PICTURE + 1)


def test_the_current_folder_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", "../" + tmp_path.name):
        with pytest.raises(InputError, match="is the current folder; give a new one"):
            check_target(Path(name))


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_kept_and_what_it_leads_to_is_written(tmp_path: Path, there: bool) -> None:
    link, real = tmp_path / "link", tmp_path / "disk" / "real"
    if there:
        real.mkdir(parents=True)
    link.symlink_to(real)
    check_target(link)
    write_samples(link, np.zeros((2, 3, 3), np.uint8), None, ())
    assert link.is_symlink()
    assert sorted(path.name for path in real.iterdir()) == ["0.png", "1.png"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 251 + ".npz")
    check_target(path)
    write_samples(path, np.zeros((2, 3, 3), np.uint8), None, ())
    assert np.load(path)["images"].shape == (2, 3, 3)
