"""Random changes of images: what they leave alone, and what they change."""

from __future__ import annotations

import torch

from rapid.config.sections import AugmentSettings
from rapid.data.augment import augment

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
