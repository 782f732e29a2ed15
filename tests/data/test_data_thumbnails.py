"""Thumbnails compared with other ways to average; near-duplicates on copies and on other images."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rapid.config.sections import ImageSettings
from rapid.data import fit_images, load_images, sample_path
from rapid.data.thumbnails import BLOCK, FAINTEST, LIKENESS, NearDuplicates, thumbnails

Images = NDArray[np.uint8]


def sample(name: str) -> Images:
    """A bundled set, padded to 32x32."""
    return fit_images(load_images(sample_path(name), name), ImageSettings(size=32, channels=1), name).images


@pytest.mark.parametrize("side", [16, 32, 64])
def test_a_thumbnail_is_the_mean_of_each_cell(side: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, side, side), np.uint8)
    cell = side // 16
    means = images.reshape(5, 16, cell, 16, cell).mean((2, 4)).reshape(5, 256)
    found = thumbnails(images)
    assert found.dtype == np.uint8
    assert np.abs(found - means).max() <= 0.5
    for image, one in zip(images, found, strict=True):
        box = np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.BOX), np.int64)
        assert np.abs(box.ravel() - one).max() <= 1


@pytest.mark.parametrize("shape", [(28, 28), (8, 8), (20, 33), (1, 1), (32, 32, 3)])
def test_every_size_has_a_thumbnail_that_depends_on_its_image_only(shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(1).integers(0, 256, (BLOCK + 3, *shape), np.uint8)
    found = thumbnails(images)
    assert found.shape == (BLOCK + 3, 256)
    for row in (0, BLOCK - 1, BLOCK + 2):
        assert (thumbnails(images[row : row + 1])[0] == found[row]).all()
    assert thumbnails(images[:0]).shape == (0, 256)


def test_colours_count_by_their_luma() -> None:
    colours = np.zeros((3, 32, 32, 3), np.uint8)
    for channel in range(3):
        colours[channel, ..., channel] = 200
    assert thumbnails(colours)[:, 0].tolist() == [60, 117, 23]
    grey = np.random.default_rng(2).integers(0, 256, (2, 32, 32), np.uint8)
    assert np.abs(thumbnails(np.repeat(grey[..., None], 3, -1)).astype(int) - thumbnails(grey)).max() <= 1


def near_duplicates(
    queries: Images, references: Images, advance: Callable[[int], None] | None = None
) -> NDArray[np.bool_]:
    return NearDuplicates(references).among(queries, advance)


def test_the_rule_is_a_bound_on_the_correlation() -> None:
    rng = np.random.default_rng(3)
    references = rng.integers(0, 256, (60, 256)).astype(np.uint8)
    noise = rng.normal(0, 1, (60, 256)) * np.linspace(0, 14, 60)[:, None]
    queries = (references + noise).clip(0, 255).astype(np.uint8)
    largest = np.corrcoef(queries, references)[:60, 60:].max(1)
    clear = np.abs(largest - LIKENESS) > 1e-4
    found = near_duplicates(queries, references)
    assert (found == (largest >= LIKENESS))[clear].all()
    assert 10 < found.sum() < 50


def as_jpeg(images: Images) -> Images:
    made = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=75)
        made.append(np.asarray(Image.open(file)))
    return np.stack(made)


def noisy(images: Images) -> Images:
    noise = np.random.default_rng(4).integers(-2, 3, images.shape)
    return (images + noise).clip(0, 255).astype(np.uint8)


COPIES: dict[str, Callable[[Images], Images]] = {
    "exact": lambda images: images,
    "noise": noisy,
    "jpeg": as_jpeg,
    "brighter": lambda images: (images * 1.1).clip(0, 255).astype(np.uint8),
    "darker": lambda images: (images * 0.8 + 10).astype(np.uint8),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("name", ["letters", "digits"])
def test_copies_are_found(name: str, kind: str) -> None:
    images = sample(name)
    assert near_duplicates(thumbnails(COPIES[kind](images)), thumbnails(images)).all()


def test_other_images_and_what_is_moved_are_not() -> None:
    letters, digits = sample("letters"), sample("digits")
    assert not near_duplicates(thumbnails(digits), thumbnails(letters)).any()
    assert not near_duplicates(thumbnails(255 - letters), thumbnails(letters)).any()
    moved = np.roll(letters, 1, axis=2)
    assert near_duplicates(thumbnails(moved), thumbnails(letters)).mean() < 0.01


def test_blank_and_faint_images_are_like_none() -> None:
    blank = np.stack([np.full((32, 32), level, np.uint8) for level in (0, 7, 128, 255)])
    assert not near_duplicates(thumbnails(blank), thumbnails(blank)).any()
    grey = np.full((50, 32, 32), 128, np.uint8)
    assert not near_duplicates(thumbnails(noisy(grey)), thumbnails(noisy(grey))).any()
    edge = np.full((2, 32, 32), 100, np.uint8)
    edge[0, :, 16:] += int(2 * FAINTEST) - 2
    edge[1, :, 16:] += int(2 * FAINTEST) + 2
    assert near_duplicates(thumbnails(edge), thumbnails(edge)).tolist() == [False, True]


def test_an_answer_depends_on_no_other_query() -> None:
    rng = np.random.default_rng(5)
    references = rng.integers(0, 256, (BLOCK + 10, 256)).astype(np.uint8)
    queries = rng.integers(0, 256, (BLOCK + 7, 256)).astype(np.uint8)
    # copies of the last reference, which is in a block by itself
    queries[[3, BLOCK + 6]] = references[-1]
    done: list[int] = []
    found = near_duplicates(queries, references, done.append)
    assert found.nonzero()[0].tolist() == [3, BLOCK + 6]
    assert done == [BLOCK, 7]
    assert near_duplicates(queries[3:4], references).tolist() == [True]
    assert near_duplicates(queries[:0], references).shape == (0,)
