"""Random views against loops over pixels, and their independence of the other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rapid.config.sections import AugmentSettings, ViewSettings
from rapid.data.augment import transformed
from rapid.data.views import DRAWS, random_views

KINDS = [
    ViewSettings(shift=0),
    ViewSettings(shift=3),
    ViewSettings(shift=3, border="reflect", flip=True),
    ViewSettings(shift=2, cutout=4, flip=True),
    ViewSettings(shift=2, cutout=5, border="reflect"),
]


def place(draw: float, count: int) -> int:
    return min(count - 1, int(np.float32(draw) * np.float32(count)))


def by_hand(image: NDArray[np.float32], draws: NDArray[np.float32], own: ViewSettings) -> NDArray[np.float32]:
    """The view of one image (C, H, W), by numpy's padding and slices."""
    pad, (_, height, width) = own.shift, image.shape
    margins = ((0, 0), (pad, pad), (pad, pad))
    if own.border == "black":
        padded = np.pad(image, margins, constant_values=-1.0)
    else:
        padded = np.pad(image, margins, mode="reflect")
    top, left = (place(draw, 2 * pad + 1) for draw in draws[2:4])
    view = padded[:, top : top + height, left : left + width].copy()
    if own.flip and draws[4] <= 0.5:
        view = view[:, :, ::-1].copy()
    if own.cutout:
        y, x = (place(draw, size) - own.cutout // 2 for draw, size in zip(draws[5:7], (height, width), strict=True))
        rows, columns = (slice(max(0, start), max(0, start + own.cutout)) for start in (y, x))
        view[:, rows, columns] = -1.0 if own.border == "black" else 0.0
    return view


@given(st.integers(0, 10_000), st.sampled_from(KINDS), st.sampled_from([1, 3]))
def test_views_are_those_of_slices(seed: int, own: ViewSettings, channels: int) -> None:
    rng = np.random.default_rng(seed)
    images = rng.uniform(-1, 1, (4, channels, 7, 9)).astype(np.float32)
    draws = rng.choice([0.0, 0.3, 0.5, 0.77, 1.0], (4, DRAWS)).astype(np.float32)
    found = random_views(torch.from_numpy(images), torch.from_numpy(draws), own).numpy()
    for row in range(4):
        np.testing.assert_array_equal(found[row], by_hand(images[row], draws[row], own))


def test_a_view_does_not_depend_on_the_others() -> None:
    own = ViewSettings(rotate=20, scale=0.2, shift=2, flip=True, cutout=3)
    images, draws = torch.rand(5, 1, 8, 8) * 2 - 1, torch.rand(5, DRAWS)
    together = random_views(images, draws, own)
    for row in range(5):
        alone = random_views(images[row : row + 1], draws[row : row + 1], own)
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0])
def test_without_ranges_nothing_changes(draw: float) -> None:
    images = torch.rand(3, 1, 6, 6) * 2 - 1
    assert torch.equal(random_views(images, torch.full((3, DRAWS), draw), ViewSettings(shift=0)), images)


def test_all_places_of_a_crop_are_equally_likely() -> None:
    images = torch.full((20_000, 1, 5, 5), -1.0)
    images[:, 0, 2, 2] = 1.0
    draws = torch.rand(20_000, DRAWS, generator=torch.Generator().manual_seed(0))
    views = random_views(images, draws, ViewSettings(shift=2))
    shares = (views[:, 0] == 1).float().mean(0)
    torch.testing.assert_close(shares, torch.full((5, 5), 0.04), rtol=0, atol=0.008)


def test_turning_and_scaling_are_those_of_augmentation() -> None:
    images, uniform = torch.rand(40, 3, 8, 8) * 2 - 1, torch.rand(40, DRAWS)
    found = random_views(images, uniform, ViewSettings(rotate=20, size=0.9, scale=0.2))
    draws = torch.full((6, 40), 0.5)
    draws[:2] = uniform[:, :2].T
    expected = transformed(images, AugmentSettings(rotate=20, size=0.9, scale=0.2, shift=0), draws)
    torch.testing.assert_close(found, expected)
