"""Random views of images: crops after padding, mirroring and Cutout, from given uniform draws.

Sources: padding and cropping as usual for CIFAR; Cutout: DeVries and Taylor 2017. All randomness is an argument, row by
row, so that views of private images can come from secret randomness.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import AugmentSettings, ViewSettings
from rapid.data.augment import transformed

DRAWS = 7
"""Uniform numbers for a view: rotation, scale, crop (down, right), mirroring, Cutout (down, right)."""


def random_views(images: Tensor, draws: Tensor, settings: ViewSettings) -> Tensor:
    """One view of each image.

    Args:
        images: float (N, C, H, W) in [-1, 1].
        draws: uniform on [0, 1], float (N, DRAWS), on the device of the images.
        settings: the ranges; with `border` reflect, `shift` must be less than H and W.

    Returns:
        float (N, C, H, W) in [-1, 1]; row n depends on image n and draws n alone.
    """
    if settings.rotate or settings.scale or settings.size != 1:
        turned = AugmentSettings(
            rotate=settings.rotate, size=settings.size, scale=settings.scale, shift=0, border=settings.border
        )
        half = torch.full_like(draws[:, 0], 0.5)
        rows = torch.stack([draws[:, 0], draws[:, 1], half, half, half, half])
        images = transformed(images, turned, rows.to(images.dtype))
    if settings.shift:
        images = _cropped(images, draws[:, 2:4], settings)
    if settings.flip:
        images = torch.where(draws[:, 4, None, None, None] <= 0.5, images.flip(3), images)
    if settings.cutout:
        images = _cut(images, draws[:, 5:7], settings)
    return images


def _cropped(images: Tensor, draws: Tensor, settings: ViewSettings) -> Tensor:
    """Pad by `shift` on all sides and crop to the old size, at one of the (2 shift + 1)^2 places."""
    pad = settings.shift
    margins = (pad, pad, pad, pad)
    padded = F.pad(images, margins, value=-1.0) if settings.border == "black" else F.pad(images, margins, "reflect")
    first = _whole(draws, 2 * pad + 1)
    count, channels, height, width = images.shape
    rows = first[:, :1] + torch.arange(height, device=images.device)
    columns = first[:, 1:] + torch.arange(width, device=images.device)
    rows = rows[:, None, :, None].expand(count, channels, height, padded.shape[3])
    columns = columns[:, None, None, :].expand(count, channels, height, width)
    return padded.gather(2, rows).gather(3, columns)


def _cut(images: Tensor, draws: Tensor, settings: ViewSettings) -> Tensor:
    """Blank a square around a random pixel; what lies outside of the image is cut off."""
    height, width = images.shape[2:]
    blank = torch.ones((), dtype=torch.bool, device=images.device)
    for axis, size in ((0, height), (1, width)):
        centre = _whole(draws[:, axis : axis + 1], size)
        place = torch.arange(size, device=images.device)
        start = centre - settings.cutout // 2
        inside = (place >= start) & (place < start + settings.cutout)
        blank = blank & (inside[:, None, :, None] if axis == 0 else inside[:, None, None, :])
    # black among white strokes, and grey, the middle of the range, in photographs
    return images.masked_fill(blank, -1.0 if settings.border == "black" else 0.0)


def _whole(draws: Tensor, count: int) -> Tensor:
    """Uniform on 0..count-1, int64, from draws that may be 0 or 1."""
    return (draws * count).long().clamp(max=count - 1)
