"""Random changes of images: what they leave alone, and what they change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid.config.sections import AugmentSettings
from rapid.data.augment import augment, transformed

NOTHING = AugmentSettings(rotate=0, scale=0, shift=0)


def test_augmentation() -> None:
    images = torch.rand(6, 1, 16, 16) * 2 - 1
    torch.testing.assert_close(augment(images, NOTHING, torch.Generator()), images, rtol=1e-4, atol=1e-4)
    views = augment(images, AugmentSettings(brightness=0.5), torch.Generator().manual_seed(1))
    assert views.min() >= -1
    assert views.max() <= 1
    assert not torch.allclose(views, images, atol=0.1)
    # every image has its own transformation
    same = augment(images[:1].repeat(6, 1, 1, 1), AugmentSettings(), torch.Generator().manual_seed(1))
    assert len({view.numpy().tobytes() for view in same}) == 6
    flipped = augment(images.repeat(10, 1, 1, 1), NOTHING.model_copy(update={"flip": True}), torch.Generator())
    kinds = [
        (torch.allclose(view, image, atol=1e-3), torch.allclose(view, image.flip(-1), atol=1e-3))
        for view, image in zip(flipped, images.repeat(10, 1, 1, 1), strict=True)
    ]
    assert {(True, False), (False, True)} == set(kinds)


def with_draws(images: torch.Tensor, settings: AugmentSettings, **draws: float) -> torch.Tensor:
    """Views by these draws, and 0.5, which changes nothing, for all others."""
    names = ("rotation", "scale", "mirroring", "right", "down", "brightness")
    column = torch.tensor([draws.get(name, 0.5) for name in names])
    return transformed(images, NOTHING.model_copy(update=settings.model_dump(exclude_unset=True)), column[:, None])


def test_turns_are_in_degrees_both_ways() -> None:
    image = torch.rand(1, 3, 12, 12) * 2 - 1
    for draw, quarter in ((1.0, 1), (0.0, -1)):
        found = with_draws(image, AugmentSettings(rotate=90), rotation=draw)
        torch.testing.assert_close(found, image.rot90(quarter, (2, 3)), rtol=0, atol=1e-4)
    # half of the way is half of the angle: a square's corner comes to where its side was
    square = torch.full((1, 1, 33, 33), -1.0)
    square[..., 8:25, 8:25] = 1.0
    turned = with_draws(square, AugmentSettings(rotate=90), rotation=0.75)
    assert turned[0, 0, 16, 16 + 11] > 0.9 > -0.9 > turned[0, 0, 16 - 8, 16 - 8]


@pytest.mark.parametrize(("draw", "factor"), [(1.0, 1.5), (0.5, 1.0), (0.0, 0.5)])
def test_sizes_are_relative_to_the_middle(draw: float, factor: float) -> None:
    square = torch.full((1, 1, 64, 64), -1.0)
    square[..., 22:42, 22:42] = 1.0
    for middle in (1.0, 0.8):
        found = with_draws(square, AugmentSettings(size=middle, scale=0.5), scale=draw)
        area = float((found + 1).sum() / 2)
        assert area == pytest.approx(400 * (middle * factor) ** 2, rel=0.02)


@pytest.mark.parametrize("border", ["black", "reflect"])
def test_shifts_are_shares_of_the_side(border: str) -> None:
    """Against numpy's padding; the first draw is across, the second one down."""
    image = torch.rand(1, 1, 16, 16) * 2 - 1
    settings = AugmentSettings(shift=3 / 16, border=border)  # type: ignore[arg-type]
    modes = {"black": {"constant_values": -1}, "reflect": {}}
    kind = {"black": "constant", "reflect": "symmetric"}[border]
    wide = np.pad(image[0, 0].numpy(), 3, mode=kind, **modes[border])  # type: ignore[call-overload]
    places = {"right": {0.0: (3, 0), 1.0: (3, 6)}, "down": {0.0: (0, 3), 1.0: (6, 3)}}
    for name, ends in places.items():
        for draw, (top, left) in ends.items():
            found = with_draws(image, settings, **{name: draw})
            expected = torch.from_numpy(wide[top : top + 16, left : left + 16])[None, None]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_brightness_is_a_gain_of_light_over_black() -> None:
    image = torch.linspace(-1, 1, 16).view(1, 1, 4, 4)
    for draw, gain in ((0.0, 0.5), (0.5, 1.0), (1.0, 1.5)):
        found = with_draws(image, AugmentSettings(brightness=0.5), brightness=draw)
        torch.testing.assert_close(found, ((image + 1) * gain - 1).clamp(-1, 1), rtol=0, atol=1e-5)
