"""Symmetries of image sets, by sets that have them or not by construction."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rapid.data import load_images, sample_path
from rapid.data.symmetry import (
    content_box,
    content_share,
    has_plain_background,
    has_strokes,
    mirrored_alike,
    turned_alike,
)


def smooth(count: int, colours: int, seed: int = 0) -> NDArray[np.uint8]:
    """Images of random blots: no direction and no place is special."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(0, 255, (count, 6, 6, colours)).repeat(4, 1).repeat(4, 2)
    return (0.8 * coarse + rng.uniform(0, 50, coarse.shape)).astype(np.uint8)


@pytest.mark.parametrize("colours", [1, 3])
def test_blots_have_all_symmetries(colours: int) -> None:
    images = smooth(1500, colours)
    images = images[..., 0] if colours == 1 else images
    assert mirrored_alike(images)
    assert turned_alike(images)
    assert not has_plain_background(images)


def test_light_from_the_left_is_no_mirror_symmetry() -> None:
    images = smooth(1500, 3).astype(float)
    lit = np.clip(images * np.linspace(1, 0.6, 24)[None, None, :, None], 0, 255).astype(np.uint8)
    assert not mirrored_alike(lit)
    assert not turned_alike(lit)


def test_light_from_above_is_a_mirror_symmetry_only() -> None:
    images = smooth(1500, 3).astype(float)
    lit = np.clip(images * np.linspace(1, 0.6, 24)[None, :, None, None], 0, 255).astype(np.uint8)
    assert mirrored_alike(lit)
    assert not turned_alike(lit)


@pytest.mark.parametrize("name", ["letters", "digits"])
def test_writing_has_no_symmetry_and_a_plain_background(name: str) -> None:
    images = load_images(sample_path(name), "-").images
    assert not mirrored_alike(images)
    assert not turned_alike(images)
    assert has_plain_background(images)
    assert has_strokes(images)
    # ink on paper
    assert has_strokes(255 - images)
    # pencil
    assert not has_strokes(images // 2)


def test_a_scan_on_black_has_no_strokes() -> None:
    scans = smooth(300, 1)[..., 0]
    rows, columns = np.indices(scans.shape[1:]) - scans.shape[1] / 2
    scans[:, rows**2 + columns**2 > 81] = 0
    # not all in one place: corners alone are no background
    scans[::2], scans[1::2] = (np.roll(part, by, (1, 2)) for part, by in ((scans[::2], -3), (scans[1::2], 3)))
    assert has_plain_background(scans)
    assert not has_strokes(scans)


def framed(images: NDArray[np.uint8], width: int = 6) -> NDArray[np.uint8]:
    around = [(0, 0), (width, width), (width, width), *[(0, 0)] * (images.ndim - 3)]
    return np.pad(images, around)


@pytest.mark.parametrize("colours", [1, 3])
def test_a_black_frame_around_all_images_is_found(colours: int) -> None:
    images = smooth(20, colours) // 2 + 1
    images = images[..., 0] if colours == 1 else images
    assert content_box(images) == (slice(0, 24), slice(0, 24))
    assert content_share(images) == 1
    assert content_box(framed(images)[:, 2:, 1:]) == (slice(4, 28), slice(5, 29))
    assert content_share(framed(images)) == pytest.approx((24 / 36) ** 2)
    # a pixel in one image and channel is enough
    odd = framed(images)
    odd[7, 0, 35, ...] = 0
    odd.reshape(20, 36, 36, -1)[7, 0, 35, -1] = 1
    assert content_box(odd) == (slice(0, 30), slice(6, 36))
    black = np.zeros((3, 8, 9), np.uint8)
    assert content_box(black) == (slice(0, 8), slice(0, 9))
    assert content_share(black) == 1
    assert content_box(black[:0]) == (slice(0, 8), slice(0, 9))


def test_a_frame_makes_no_writing_of_photographs_and_takes_none_from_writing() -> None:
    bright = 155 + smooth(500, 1)[..., 0] // 3
    framed_alike = framed(bright)
    assert not has_plain_background(framed_alike)
    assert not has_strokes(framed_alike)
    for name in ("letters", "digits"):
        images = load_images(sample_path(name), "-").images
        for ink in (images, 255 - images):
            assert has_plain_background(framed(ink, 10))
            assert has_strokes(framed(ink, 10))
        assert not has_strokes(framed(255 - images // 2, 10))


def test_oblong_images_are_not_turned_and_few_images_prove_nothing() -> None:
    assert not turned_alike(smooth(1500, 3)[:, :10])
    assert not mirrored_alike(smooth(40, 3))
    assert not mirrored_alike(smooth(1, 1)[..., 0])
