"""The common form of images, against Pillow's own operations and the formulas; and what is said of it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image, ImageOps

from rapid.data import load_images
from rapid.data.readers.form import CLEAR, DEEP, PALETTE, SPACE, TURNED, TooDeepError, to_form
from rapid.errors import InputError

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))
GREY = SHAPES.flatmap(lambda shape: hnp.arrays(np.uint8, shape))
COLOUR = SHAPES.flatmap(lambda shape: hnp.arrays(np.uint8, (*shape, 3)))


def opened(image: Image.Image, kind: str = "PNG", **how: object) -> Image.Image:
    """The image as it is read from a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return Image.open(stream)


@settings(max_examples=50, deadline=None)
@given(st.one_of(GREY, COLOUR))
def test_what_has_the_form_stays_as_it_is(pixels: NDArray[np.uint8]) -> None:
    found = to_form(opened(Image.fromarray(pixels)))
    assert found.changes == ()
    assert found.pixels.dtype == np.uint8
    assert np.array_equal(found.pixels, pixels)


@settings(max_examples=50, deadline=None)
@given(SHAPES.flatmap(lambda shape: hnp.arrays(np.uint16, shape)), st.sampled_from(["PNG", "TIFF", "PPM"]))
def test_sixteen_bits_are_scaled_to_eight(pixels: NDArray[np.uint16], kind: str) -> None:
    found = to_form(opened(Image.fromarray(pixels), kind))
    assert found.changes == (DEEP,)
    # rounded to the nearest, by a formula of its own
    assert np.array_equal(found.pixels, np.floor(pixels / 257 + 0.5).astype(np.uint8))


@settings(max_examples=50, deadline=None)
@given(st.one_of(GREY, COLOUR), st.integers(1, 8), st.sampled_from(["PNG", "TIFF"]))
def test_images_are_upright(pixels: NDArray[np.uint8], orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(pixels)
    found = to_form(opened(image, kind, exif=exif))
    upright = ImageOps.exif_transpose(opened(image, "PNG", exif=exif))
    assert np.array_equal(found.pixels, np.asarray(upright))
    # Pillow turns a TIFF itself
    assert (TURNED in found.changes) == (orientation > 1 and kind == "PNG")


@settings(max_examples=50, deadline=None)
@given(st.one_of(GREY, COLOUR), st.data())
def test_transparency_is_laid_on_black(pixels: NDArray[np.uint8], data: st.DataObject) -> None:
    opacity = data.draw(hnp.arrays(np.uint8, pixels.shape[:2]))
    image = Image.fromarray(pixels)
    image.putalpha(Image.fromarray(opacity))
    found = to_form(opened(image))
    assert found.changes == (CLEAR,)
    share = opacity / 255 if pixels.ndim == 2 else opacity[..., None] / 255
    assert found.pixels.shape == pixels.shape
    assert np.abs(found.pixels - pixels * share).max() <= 1
    # one colour that stands for "transparent", as old PNGs have it
    key = int(pixels.flat[0]) if pixels.ndim == 2 else tuple(map(int, pixels[0, 0]))
    keyed = to_form(opened(Image.fromarray(pixels), transparency=key)).pixels
    clear = pixels == key if pixels.ndim == 2 else (pixels == key).all(-1, keepdims=True)
    assert np.array_equal(keyed, np.where(clear, 0, pixels))


@settings(max_examples=30, deadline=None)
@given(COLOUR)
def test_palettes_become_rgb(pixels: NDArray[np.uint8]) -> None:
    image = Image.fromarray(pixels).quantize(16)
    found = to_form(opened(image))
    assert found.changes == (PALETTE,)
    assert np.array_equal(found.pixels, np.asarray(image.convert("RGB")))
    clear = to_form(opened(image, transparency=0))
    assert clear.changes == (PALETTE, CLEAR)
    seen = np.asarray(image) != 0
    assert np.array_equal(clear.pixels, np.asarray(image.convert("RGB")) * seen[..., None])


def test_other_forms() -> None:
    bits = np.random.default_rng(0).integers(0, 2, (5, 7)).astype(bool)
    assert np.array_equal(to_form(opened(Image.fromarray(bits))).pixels, bits * np.uint8(255))
    cmyk = Image.new("CMYK", (3, 2), (0, 255, 255, 0))
    found = to_form(opened(cmyk, "TIFF"))
    assert found.changes == (SPACE,)
    assert (found.pixels == [255, 0, 0]).all()
    for dtype in (np.int32, np.float32):
        with pytest.raises(TooDeepError):
            to_form(opened(Image.fromarray(np.ones((2, 2), dtype)), "TIFF"))


def make(folder: Path) -> Path:
    """Six colour images: plain, turned, with transparency, with a palette, both of the latter, CMYK."""
    folder.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (6, 4, 4, 3), np.uint8)
    images = [Image.fromarray(one) for one in pixels]
    exif = Image.Exif()
    exif[0x0112] = 6
    images[0].save(folder / "a.png")
    images[1].save(folder / "b.jpg", exif=exif)
    images[2].putalpha(77)
    images[2].save(folder / "c.png")
    images[3].quantize(8).save(folder / "d.png")
    images[4].quantize(8).save(folder / "e.gif", transparency=1)
    images[5].convert("CMYK").save(folder / "f.jpg")
    return folder


def test_one_line_says_what_was_done_to_public_images_and_none_to_private_ones(tmp_path: Path) -> None:
    folder = make(tmp_path / "set")
    public, private = load_images(folder, "public"), load_images(folder, "private", show_paths=False)
    assert public.images.shape == (6, 4, 4, 3)
    assert public.notes == (
        "of 6 images 1 turned as their EXIF tag says; 2 with transparency, now on black; 2 with a palette, now RGB; "
        "1 of another colour space, now RGB",
    )
    assert private.notes == ()
    assert np.array_equal(private.images, public.images)


def test_mixed_channels_are_refused_whatever_the_files_look_like(tmp_path: Path) -> None:
    folder = make(tmp_path / "set")
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(folder / "secret.png")
    with pytest.raises(InputError, match=r"secret.png is 4x4 grey, expected 4x4 RGB like the first image"):
        load_images(folder, "public")
    with pytest.raises(InputError, match=r"several sizes or colour modes; .* rerun with --show-paths") as caught:
        load_images(folder, "private", show_paths=False)
    assert "secret" not in str(caught.value)
