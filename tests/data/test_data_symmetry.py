"""Symmetries of image sets, by sets that have them or not by construction."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rapid.data import load_images, sample_path
from rapid.data.symmetry import has_plain_background, has_strokes, mirrored_alike, turned_alike


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
    assert has_plain_background(scans)
    assert not has_strokes(scans)


def test_oblong_images_are_not_turned_and_few_images_prove_nothing() -> None:
    assert not turned_alike(smooth(1500, 3)[:, :10])
    assert not mirrored_alike(smooth(40, 3))
    assert not mirrored_alike(smooth(1, 1)[..., 0])
