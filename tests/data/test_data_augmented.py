"""Augmented public images: which originals, how often, and that they are reproducible."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapid.config.sections import AugmentSettings
from rapid.data import to_unit_range
from rapid.data.augment import augment
from rapid.data.augmented import AugmentedImages, even_rows

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), count=st.integers(1, 200))
def test_sets_and_their_images_are_used_equally_often(sizes: list[int], count: int) -> None:
    sources = np.repeat(np.arange(len(sizes)), sizes)
    used = np.bincount(even_rows(sources, count), minlength=len(sources))
    assert used.sum() == count
    by_set = [used[sources == number] for number in range(len(sizes))]
    totals = [part.sum() for part in by_set]
    assert max(totals) - min(totals) <= 1
    assert all(part.max() - part.min() <= 1 for part in by_set)


def test_without_augmentation_the_images_are_unchanged() -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 8, 8), np.uint8)
    augmented = AugmentedImages(images, np.zeros(7, np.int64), 0, AugmentSettings(), CPU)
    assert len(augmented) == 7
    assert torch.equal(torch.cat(list(augmented.batches(3))), to_unit_range(images))
    known = {image.numpy().tobytes() for image in to_unit_range(images)}
    assert {image.numpy().tobytes() for image in augmented.draw(20, torch.Generator().manual_seed(0))} <= known


def test_augmented_images_differ_from_each_other_and_are_reproducible() -> None:
    images = np.zeros((2, 16, 16), np.uint8)
    images[:, 4:12, 6:10] = 255
    augmented = AugmentedImages(images, np.array([0, 1]), 10, AugmentSettings(), CPU)
    first, again = (torch.cat(list(augmented.batches(4))) for _ in range(2))
    assert torch.equal(first, again)
    assert len({image.numpy().tobytes() for image in first}) == 10
    assert sorted(augmented.rows.tolist()) == [0] * 5 + [1] * 5


def test_the_mean_size_shrinks_and_enlarges() -> None:
    square = -torch.ones(1, 1, 32, 32)
    square[:, :, 8:24, 8:24] = 1
    for size in (0.5, 1.0, 1.5):
        settings = AugmentSettings(rotate=0, size=size, scale=0, shift=0)
        area = float((augment(square, settings, torch.Generator()) + 1).sum() / 2)
        np.testing.assert_allclose(area, 256 * size**2, rtol=0.05)
