"""Augmented public images: which are shown, how often, and that they are the same ones each time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapid.config.sections import AugmentSettings
from rapid.data import to_unit_range
from rapid.data.augmented import AugmentedImages, even_rows

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), count=st.integers(1, 200))
def test_sets_and_their_images_are_shown_equally_often(sizes: list[int], count: int) -> None:
    sources = np.repeat(np.arange(len(sizes)), sizes)
    shown = np.bincount(even_rows(sources, count), minlength=len(sources))
    assert shown.sum() == count
    by_set = [shown[sources == number] for number in range(len(sizes))]
    totals = [part.sum() for part in by_set]
    assert max(totals) - min(totals) <= 1
    assert all(part.max() - part.min() <= 1 for part in by_set)


def test_without_views_the_images_are_shown_as_they_are() -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 8, 8), np.uint8)
    views = AugmentedImages(images, np.zeros(7, np.int64), 0, AugmentSettings(), CPU)
    assert len(views) == 7
    assert torch.equal(torch.cat(list(views.batches(3))), to_unit_range(images))
    known = {image.numpy().tobytes() for image in to_unit_range(images)}
    assert {image.numpy().tobytes() for image in views.draw(20, torch.Generator().manual_seed(0))} <= known


def test_views_differ_from_image_to_image_and_are_the_same_each_time() -> None:
    images = np.zeros((2, 16, 16), np.uint8)
    images[:, 4:12, 6:10] = 255
    views = AugmentedImages(images, np.array([0, 1]), 10, AugmentSettings(), CPU)
    first, again = (torch.cat(list(views.batches(4))) for _ in range(2))
    assert torch.equal(first, again)
    assert len({view.numpy().tobytes() for view in first}) == 10
    assert sorted(views.rows.tolist()) == [0] * 5 + [1] * 5


def test_the_middle_of_the_size_shrinks_and_enlarges() -> None:
    from rapid.data.augment import augment

    square = -torch.ones(1, 1, 32, 32)
    square[:, :, 8:24, 8:24] = 1
    for size in (0.5, 1.0, 1.5):
        settings = AugmentSettings(rotate=0, size=size, scale=0, shift=0)
        area = float((augment(square, settings, torch.Generator()) + 1).sum() / 2)
        np.testing.assert_allclose(area, 256 * size**2, rtol=0.05)
