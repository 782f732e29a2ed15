"""Random views of images by given draws: crops, mirroring, turning and scaling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import AugmentSettings, ViewSettings
from rapid.data.augment import augment_by

DRAWS = 5
"""Uniform numbers that a view takes."""
SHARP = ViewSettings()
"""Neither turned nor scaled: nothing is interpolated."""


def random_views(images: Tensor, settings: ViewSettings, draws: Tensor) -> Tensor:
    """One view of each image; view i depends on image i and row i of the draws only.

    Args:
        images: float (N, C, H, W) in [-1, 1].
        settings: the ranges; `shift` is less than H and W if the border reflects.
        draws: uniform in [0, 1], float (N, DRAWS), on the device of the images.

    Returns:
        float (N, C, H, W) in [-1, 1].
    """
    if (settings.rotate, settings.size, settings.scale) != (SHARP.rotate, SHARP.size, SHARP.scale):
        affine = AugmentSettings(
            rotate=settings.rotate, size=settings.size, scale=settings.scale, shift=0, border=settings.border
        )
        # of the six draws of an augmentation the first two turn and scale; the others do nothing here
        padded = F.pad(draws[:, 3:5].T, (0, 0, 0, 4), value=0.5)
        images = augment_by(images, affine, padded.to(images.dtype))
    if settings.flip:
        images = torch.where((draws[:, 0] < 0.5).view(-1, 1, 1, 1), images.flip(3), images)
    return _cropped(images, settings, draws[:, 1:3]) if settings.shift else images


def _cropped(images: Tensor, settings: ViewSettings, draws: Tensor) -> Tensor:
    """Crops of the original size from the padded images."""
    shift, (height, width) = settings.shift, images.shape[2:]
    if settings.border == "reflect":
        padded = F.pad(images, (shift,) * 4, mode="reflect")
    else:
        padded = F.pad(images, (shift,) * 4, value=-1.0)
    top, left = (draws * (2 * shift + 1)).long().clamp(max=2 * shift).unbind(1)
    device = images.device
    number = torch.arange(len(images), device=device)[:, None, None]
    rows = top[:, None, None] + torch.arange(height, device=device)[:, None]
    columns = left[:, None, None] + torch.arange(width, device=device)
    return padded[number, :, rows, columns].permute(0, 3, 1, 2).contiguous()
