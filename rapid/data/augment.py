"""Random augmentation: each image gets its own rotation, scale, shift, mirroring and gain."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import AugmentSettings


def augment(images: Tensor, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Augment every image once.

    Args:
        images: float (N, C, H, W) in [-1, 1].
        settings: the ranges.
        generator: on the CPU.

    Returns:
        float (N, C, H, W) in [-1, 1].
    """
    return transformed(images, settings, drawn(len(images), generator).to(images.device))


def drawn(count: int, generator: torch.Generator) -> Tensor:
    """The draws of `transformed` for so many images, float (6, count), on the CPU."""
    return torch.rand(6, count, generator=generator)


def transformed(images: Tensor, settings: AugmentSettings, draws: Tensor) -> Tensor:
    """As `augment`, by given draws.

    Args:
        images: float (N, C, H, W) in [-1, 1].
        settings: the ranges.
        draws: uniform on [0, 1], float (6, N): rotation, scale, mirroring, shift right, shift down, brightness.
    """
    symmetric = 2 * draws - 1
    angle = symmetric[0] * math.radians(settings.rotate)
    # affine_grid maps output to input coordinates, so enlarging means reading a smaller region
    scale = 1 / (settings.size * (1 + symmetric[1] * settings.scale))
    mirror = torch.where(draws[2] < 0.5, -1.0, 1.0) if settings.flip else torch.ones_like(scale)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    shift = 2 * settings.shift * symmetric[3:5]
    theta = torch.stack(
        [torch.stack([cos * mirror, -sin, shift[0]], 1), torch.stack([sin * mirror, cos, shift[1]], 1)], 1
    )
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    padding = "zeros" if settings.border == "black" else "reflection"
    # shifted by 1, so that the zero padding is black
    sampled = F.grid_sample(images + 1, grid, padding_mode=padding, align_corners=False)
    gain = (1 + symmetric[5] * settings.brightness).view(-1, 1, 1, 1)
    return (sampled * gain - 1).clamp(-1, 1)
