"""Images of several sizes: against Pillow's own operations, in every format that holds them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pyarrow import parquet
from tests_sets import STRUCT, write_csv

from rapid import mapped
from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, load_images, tell
from rapid.data.canvas import Canvas, rounded_side
from rapid.data.readers.form import shape_of, to_form
from rapid.data.stored import image_digests
from rapid.errors import InputError

SHAPES = ((37, 50, 3), (8, 8), (120, 31, 3), (9, 300), (64, 64, 3))
"""Height, width, and 3 if in colour."""
KIND = st.sampled_from(["PNG", "TIFF", "WEBP", "JPEG"])


def pixels(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def by_pillow(image: NDArray[np.uint8], size: int, channels: int = 3) -> NDArray[np.uint8]:
    """The image within size x size, centred on black."""
    found = Image.fromarray(image)
    if max(found.size) > size:
        found = ImageOps.contain(found, (size, size), Image.Resampling.BICUBIC)
    sheet = Image.new(found.mode, (size, size))
    sheet.paste(found, ((size - found.width) // 2, (size - found.height) // 2))
    return np.asarray(sheet.convert("L" if channels == 1 else "RGB"))


@settings(max_examples=150, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.integers(4, 40),
    colour=st.booleans(),
    channels=st.sampled_from([1, 3]),
)
def test_contain_is_what_pillow_makes(height: int, width: int, size: int, colour: bool, channels: int) -> None:
    images = np.full((2, height, width, *((3,) if colour else ())), 255, np.uint8)
    form = ImageSettings(size=size, channels=channels, fit="contain")
    seen = fit_images(ImageSet(images, None, ()), form, "-").images[0].reshape(size, size, -1).any(2)
    rows, columns = int(seen.any(1).sum()), int(seen.any(0).sum())
    assert (rows, columns) == (height, width) or max(rows, columns) == size
    assert rows <= height
    assert columns <= width
    # the aspect ratio is kept to half a pixel; no image vanishes
    longest = max(height, width, size)
    assert abs(rows - max(1, height * size / longest)) <= 0.5 or max(height, width) <= size
    assert abs(columns - max(1, width * size / longest)) <= 0.5 or max(height, width) <= size
    if min(round(height * size / longest), round(width * size / longest)) < 1:
        # Pillow makes no image of less than a pixel
        return
    noise = pixels((2, *images.shape[1:]))
    found = fit_images(ImageSet(noise, None, ()), form, "-").images
    wanted = np.stack([by_pillow(one, size, channels) for one in noise])
    # its luma is rounded otherwise
    assert np.abs(found.astype(int) - wanted).max() <= (1 if colour and channels == 1 else 0)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.booleans(), KIND)
def test_the_header_tells_the_shape(height: int, width: int, orientation: int, colour: bool, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels((height, width, *((3,) if colour else ())))).save(stream, kind, exif=exif)
    with Image.open(stream) as header, Image.open(io.BytesIO(stream.getvalue())) as image:
        assert shape_of(header) == to_form(image).pixels.shape


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_the_header_tells_the_colours(mode: str) -> None:
    stream = io.BytesIO()
    Image.new(mode, (5, 4)).save(stream, "PNG")
    with Image.open(stream) as header, Image.open(io.BytesIO(stream.getvalue())) as image:
        assert shape_of(header) == to_form(image).pixels.shape


def png(image: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def as_folder(files: list[bytes], path: Path) -> Path:
    (path / "a").mkdir(parents=True)
    for number, content in enumerate(files):
        (path / "a" / f"{number:03}.png").write_bytes(content)
    return path


def as_table(files: list[bytes], path: Path) -> Path:
    as_folder(files, path)
    write_csv(path / "labels.csv", [{"file": f"a/{number:03}.png", "label": "a"} for number in range(len(files))])
    return path


def as_parquet(files: list[bytes], path: Path) -> Path:
    path.mkdir()
    images = pa.array([{"bytes": content, "path": "a"} for content in files], STRUCT)
    parquet.write_table(pa.table({"image": images, "label": ["a"] * len(files)}), path / "a.parquet")
    return path


def as_tar(files: list[bytes], path: Path) -> Path:
    path.mkdir()
    with tarfile.open(path / "a.tar.gz", "w:gz") as archive:
        for number, content in enumerate(files):
            for suffix, held in (("png", content), ("cls", b"a")):
                member = tarfile.TarInfo(f"{number:03}.{suffix}")
                member.size = len(held)
                archive.addfile(member, io.BytesIO(held))
    return path


FORMATS = (as_folder, as_table, as_parquet, as_tar)
Write = Callable[[list[bytes], Path], Path]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_may_hold_several_sizes(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LARGE", 1000)
    images = [pixels(SHAPES[number % len(SHAPES)], number) for number in range(90)]
    path = write([png(image) for image in images], tmp_path / "set")
    contained = np.stack([by_pillow(image, 32) for image in images])
    for target in (ImageSettings(size=32, channels=3, fit="contain"), Canvas(32)):
        found = load_images(path, "public", target=target)
        assert np.array_equal(found.images, contained)
        assert found.notes == ("scaled down to fit into 32x32",)
        assert found.labels is not None
        assert found.labels.tolist() == [0] * 90
    assert found.stored is not None
    assert (found.stored.sizes, found.stored.side) == ("8x8 to 64x64", 300)
    stretched = load_images(path, "public", target=ImageSettings(size=20, channels=3, fit="resize")).images
    with Image.open(io.BytesIO(png(images[2]))) as image:
        assert np.array_equal(stretched[2], np.asarray(image.resize((20, 20), Image.Resampling.BICUBIC)))
    # a canvas is as small as the largest image allows, and padding needs no scaling
    assert load_images(path, "public", target=Canvas(1000, 1000)).images.shape == (90, 304, 304, 3)
    padded = load_images(path, "public", target=ImageSettings(size=300, channels=3))
    assert padded.notes == ("padded to 300x300",)
    with pytest.raises(InputError, match="is 50x37 RGB; images larger than 32x32 pixels do not fit"):
        load_images(path, "public", target=ImageSettings(size=32, channels=3))
    with pytest.raises(InputError, match="is 8x8 grey, expected 50x37 RGB like the first"):
        load_images(path, "public")


@pytest.mark.parametrize("write", FORMATS)
def test_nothing_is_told_of_private_sizes(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write([png(pixels(shape)) for shape in SHAPES], tmp_path / "set")
    form = ImageSettings(size=32, channels=3, fit="contain")
    found = load_images(path, "private", show_paths=False, target=form)
    tell(found)
    assert found.notes == ()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(InputError, match=r"image\.fit=contain .*--show-paths") as caught:
        load_images(path, "private", show_paths=False, target=ImageSettings(size=32, channels=3))
    said = str(caught.value).replace(str(tmp_path), "")
    assert not [number for shape in SHAPES for number in shape[:2] if str(number) in said.replace("32x32", "")]


@pytest.mark.parametrize("write", FORMATS)
def test_an_account_does_not_depend_on_the_form(tmp_path: Path, write: Write) -> None:
    images = [pixels(shape) for shape in SHAPES]
    path = write([png(image) for image in images], tmp_path / "set")
    targets = (ImageSettings(size=4, fit="resize"), ImageSettings(size=32, channels=3, fit="contain"), Canvas())
    for target in targets:
        digests = load_images(path, "private", show_paths=False, target=target, digests=True).digests
        assert digests is not None
        assert np.array_equal(digests, np.concatenate([image_digests(image[None]) for image in images]))


@given(
    sides=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=5), more=st.integers(0, 2)
)
def test_a_canvas_and_padding_put_an_image_where_the_form_of_the_model_does(
    tmp_path_factory: pytest.TempPathFactory, sides: list[tuple[int, int]], more: int
) -> None:
    """Else the copies of public images among private ones, which are read in the model's form, would be missed."""
    path = as_folder([png(pixels(side)) for side in sides], tmp_path_factory.mktemp("set"))
    read = load_images(path, "public", target=Canvas())
    assert read.stored is not None
    size = min(64, rounded_side(read.stored.side) + 16 * more)
    form = ImageSettings(size=size, fit="contain")
    assert np.array_equal(fit_images(read, form, "public").images, load_images(path, "private", target=form).images)


def test_images_of_one_size(tmp_path: Path) -> None:
    images = pixels((5, 20, 70))
    np.savez(tmp_path / "a.npz", images=images)
    folder = as_folder([png(image) for image in images], tmp_path / "folder")
    for path in (tmp_path / "a.npz", folder):
        kept = load_images(path, "public", target=Canvas(32, 70))
        assert np.array_equal(kept.images, images)
        assert kept.notes == ()
        found = load_images(path, "public", target=Canvas(32, 69), digests=True)
        assert np.array_equal(found.images, np.stack([by_pillow(image, 32, 1) for image in images]))
        assert found.notes == ("scaled down to fit into 32x32",)
        assert found.digests is not None
        assert np.array_equal(found.digests, image_digests(images))
        with pytest.raises(InputError, match=r"70x20.* images larger than 32x32 pixels do not fit"):
            load_images(path, "public", target=ImageSettings(size=32))


def test_damaged_images_among_others(tmp_path: Path) -> None:
    files = [png(pixels(shape)) for shape in SHAPES]
    for number, bad in enumerate((b"no image", files[0][:-30], b"")):
        path = as_folder([*files, bad], tmp_path / str(number))
        for target in (Canvas(), ImageSettings(size=32, fit="contain")):
            with pytest.raises(InputError, match=r"005\.png: is not a readable image"):
                load_images(path, "public", target=target)


def test_a_table_that_is_not_read_is_not_passed_over(tmp_path: Path) -> None:
    files = [png(pixels((4, 4))) for _ in range(2)]
    flat = as_folder(files, tmp_path / "set") / "a"
    write_csv(flat / "diagnoses.csv", [{"name": "000.png", "dx": "a"}, {"name": "001.png", "dx": "b"}])
    with pytest.raises(InputError, match=r"'diagnoses.csv' lies beside the images and is not read: call it labels.csv"):
        load_images(flat, "private")
    with pytest.raises(InputError, match=r"a table lies beside the images .*--label-column none") as caught:
        load_images(flat, "private", show_paths=False)
    assert "diagnoses" not in str(caught.value)
    assert load_images(flat, "private", label_column="none").labels is None
    # class folders are labels already, but a single one may be called `images`
    (flat / "diagnoses.csv").rename(tmp_path / "set" / "notes.jsonl")
    with pytest.raises(InputError, match=r"'notes.jsonl' lies beside the images"):
        load_images(tmp_path / "set", "private")
    (tmp_path / "set" / "b").mkdir()
    (tmp_path / "set" / "b" / "1.png").write_bytes(files[0])
    assert load_images(tmp_path / "set", "private").classes == ("a", "b")
    (tmp_path / "set" / "notes.jsonl").rename(flat / "labels.csv")
    (flat / "labels.csv").write_text("file,label\n000.png,x\n001.png,y\n")
    assert load_images(flat, "private").classes == ("x", "y")
    assert load_images(flat, "private", label_column="none").labels is None
