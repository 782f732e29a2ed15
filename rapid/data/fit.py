"""Fitting images to the size and channels of a bundle, and converting between uint8 and network inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from rapid.config.sections import ImageSettings
from rapid.data.image_set import ImageSet
from rapid.errors import InputError
from rapid.mapped import blocks, empty

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


def fit_images(images: ImageSet, settings: ImageSettings, field: str) -> ImageSet:
    """Convert images to S x S pixels and C channels, S = settings.size and C = settings.channels.

    Grey images are repeated into RGB; RGB images are reduced to their luma. `pad` centres the image on black without
    scaling; `resize` is bicubic with antialiasing and does not keep the aspect ratio. Each image is converted on its
    own, independently of the others.

    Args:
        images: the set.
        settings: target size and channels.
        field: name of the argument that gave the images; for messages.

    Raises:
        InputError: an image is larger than S x S and `fit` is `pad`.
    """
    pixels = images.images
    size = settings.size
    height, width = pixels.shape[1:3]
    if settings.fit == "pad" and max(height, width) > size:
        problem = f"images of {width}x{height} do not fit into {size}x{size}, and image.fit=pad never scales"
        raise InputError(field, f"{problem}; give smaller images or build the bundle with --set image.fit=resize")
    if (height, width, images.channels) == (size, size, settings.channels):
        return images
    fitted = empty((len(pixels), size, size) + (3,) * (settings.channels == 3))
    start = 0
    for block in blocks(pixels):
        fitted[start : start + len(block)] = _fit(block, settings)
        start += len(block)
    return replace(images, images=fitted)


def to_unit_range(images: NDArray[np.uint8], device: torch.device | str = "cpu") -> torch.Tensor:
    """Convert uint8 (N, H, W) or (N, H, W, 3) to network input: float32 (N, C, H, W) in [-1, 1] on `device`."""
    planes = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return unit_range(torch.from_numpy(np.ascontiguousarray(planes)).to(device))


def unit_range(planes: torch.Tensor) -> torch.Tensor:
    """The same of uint8 (N, C, H, W), on its device."""
    return planes.float().div_(127.5).sub_(1.0)


def to_uint8(images: torch.Tensor) -> NDArray[np.uint8]:
    """Convert float (N, C, H, W) in [-1, 1] to uint8 (N, H, W) or (N, H, W, 3), rounded and clamped."""
    return from_planes(to_planes(images).cpu().numpy())


def to_planes(images: torch.Tensor) -> torch.Tensor:
    """Convert float (N, C, H, W) in [-1, 1] to uint8 (N, C, H, W) on its device, rounded and clamped."""
    return images.add(1.0).mul(127.5).round().clamp(0, 255).to(torch.uint8).contiguous()


def from_planes(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bring uint8 (N, C, H, W) to the form of images, (N, H, W) or (N, H, W, 3)."""
    return np.ascontiguousarray(planes[:, 0] if planes.shape[1] == 1 else planes.transpose(0, 2, 3, 1))


def _fit(pixels: NDArray[np.uint8], settings: ImageSettings) -> NDArray[np.uint8]:
    size, colour = settings.size, pixels.ndim == 4
    if settings.channels == 1 and colour:
        pixels = np.rint(pixels @ LUMA).astype(np.uint8)
    elif settings.channels == 3 and not colour:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    if pixels.shape[1:3] != (size, size):
        pixels = _pad(pixels, size) if settings.fit == "pad" else _resize(pixels, size)
    return pixels


def _pad(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    height, width = pixels.shape[1:3]
    top, left = (size - height) // 2, (size - width) // 2
    margins = [(0, 0), (top, size - height - top), (left, size - width - left)]
    return np.pad(pixels, margins + [(0, 0)] * (pixels.ndim - 3))


def _resize(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    resized = [np.asarray(Image.fromarray(p).resize((size, size), Image.Resampling.BICUBIC)) for p in pixels]
    return np.stack(resized)
