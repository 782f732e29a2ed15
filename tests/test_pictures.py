"""PNGs as Pillow reads them: the same pixels and texts, and no larger than Pillow's own."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from rapid.data import load_images, sample_path
from rapid.pictures import encode_png, grid

images = arrays.arrays(
    np.uint8,
    st.one_of(
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3)),
    ),
)


def read(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        image.load()
        return image


@given(image=images)
def test_the_same_pixels(image: np.ndarray) -> None:
    found = read(encode_png(image))
    assert found.mode == ("L" if image.ndim == 2 else "RGB")
    np.testing.assert_array_equal(np.asarray(found), image)


@pytest.mark.parametrize("shape", [(300, 400), (200, 150, 3)])
def test_the_same_pixels_of_sheets(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(read(encode_png(image))), image)
    np.testing.assert_array_equal(np.asarray(read(encode_png(image[::-2, ::3]))), image[::-2, ::3])


@given(words=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=50))
def test_texts(words: str) -> None:
    image = np.zeros((2, 3), np.uint8)
    content = encode_png(image, {"Software": "rapid", "rapid": words})
    assert dict(read(content).info) == {"Software": "rapid", "rapid": words}
    assert content == encode_png(image, {"Software": "rapid", "rapid": words})


def test_about_as_small_as_pillow() -> None:
    digits = load_images(sample_path("digits"), "digits").images[:64]
    small = [*digits, *np.stack([digits, 255 - digits, digits // 2], -1)]
    for pictures in (small, [grid(digits), grid(digits).repeat(4, 0).repeat(4, 1)]):
        own, pillow = 0, 0
        for image in pictures:
            own += len(encode_png(image))
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "PNG")
            pillow += len(buffer.getvalue())
        assert own <= 1.25 * pillow


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((2, 2), np.float32),
        np.zeros((2, 2), bool),
        np.zeros(4, np.uint8),
        np.zeros((2, 2, 1), np.uint8),
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((0, 3), np.uint8),
    ],
)
def test_not_an_image(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"should be uint8 \(H, W\)"):
        encode_png(image)
