"""Random views of images, against slices of padded arrays, and row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid.config.sections import AugmentSettings, ViewSettings
from rapid.data.augment import augment_by
from rapid.data.views import DRAWS, random_views

IMAGES = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
UNIFORM = torch.rand(40, DRAWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("border", ["black", "reflect"])
def test_a_crop_is_a_slice_of_the_padded_image(border: str) -> None:
    shift = 3
    found = random_views(IMAGES, ViewSettings.model_validate({"shift": shift, "border": border}), UNIFORM)
    places = set()
    for image, view in zip(IMAGES.numpy(), found.numpy(), strict=True):
        around = [(0, 0), (shift, shift), (shift, shift)]
        wide = np.pad(image, around, constant_values=-1) if border == "black" else np.pad(image, around, "reflect")
        matches = [
            (top, left)
            for top in range(2 * shift + 1)
            for left in range(2 * shift + 1)
            if np.array_equal(wide[:, top : top + 8, left : left + 8], view)
        ]
        assert len(matches) == 1
        places.add(matches[0])
    assert len(places) > 20


def test_shifts_are_uniform() -> None:
    count, shift = 40_000, 2
    spot = torch.full((count, 1, 8, 8), -1.0)
    spot[:, :, 4, 4] = 1
    views = random_views(spot, ViewSettings(shift=shift), torch.rand(count, DRAWS, dtype=torch.float64))
    counts = torch.bincount(views.flatten(1).argmax(1), minlength=64).view(8, 8)[2:7, 2:7]
    assert int(counts.sum()) == count
    assert float(((counts - count / 25) / (count / 25) ** 0.5).abs().max()) < 5
    # the ends of the range
    for end in (0.0, 1.0):
        view = random_views(spot[:1], ViewSettings(shift=shift), torch.full((1, DRAWS), end, dtype=torch.float64))
        assert int(view.flatten().argmax()) in (2 * 8 + 2, 6 * 8 + 6)


def test_half_are_mirrored_and_nothing_else_happens_without_settings() -> None:
    assert torch.equal(random_views(IMAGES, ViewSettings(), UNIFORM), IMAGES)
    found = random_views(IMAGES, ViewSettings(flip=True), UNIFORM)
    kinds = [
        "mirrored" if torch.equal(view, image.flip(2)) else "same"
        for view, image in zip(found, IMAGES, strict=True)
        if torch.equal(view, image) or torch.equal(view, image.flip(2))
    ]
    assert len(kinds) == 40
    assert 8 < kinds.count("mirrored") < 32


def test_turning_and_scaling_are_those_of_augmentation() -> None:
    found = random_views(IMAGES, ViewSettings(rotate=20, size=0.9, scale=0.2), UNIFORM)
    draws = torch.full((6, 40), 0.5)
    draws[:2] = UNIFORM[:, 3:5].T
    expected = augment_by(IMAGES, AugmentSettings(rotate=20, size=0.9, scale=0.2, shift=0), draws)
    torch.testing.assert_close(found, expected)


def test_a_view_depends_on_its_own_row_alone() -> None:
    settings = ViewSettings(shift=2, flip=True, rotate=10, scale=0.1)
    whole = random_views(IMAGES, settings, UNIFORM)
    for row in (0, 7, 39):
        alone = random_views(IMAGES[row : row + 1], settings, UNIFORM[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-5, atol=1e-6)
