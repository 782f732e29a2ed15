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


class TooLargeError(ValueError):
    """An image is larger than S x S, and `image.fit=pad` never scales. The message says what to do."""


def fit_images(images: ImageSet, settings: ImageSettings, field: str) -> ImageSet:
    """Convert images to S x S pixels and C channels; see `fit_pixels`.

    Args:
        images: the set.
        settings: target size and channels.
        field: name of the argument that gave the images; for messages.

    Raises:
        InputError: an image is larger than S x S and `fit` is `pad`.
    """
    try:
        fitted = fit_pixels(images.images, settings)
    except TooLargeError as error:
        raise InputError(field, str(error), images.source or None) from None
    return images if fitted is images.images else replace(images, images=fitted)


def fit_pixels(pixels: NDArray[np.uint8], settings: ImageSettings) -> NDArray[np.uint8]:
    """Convert images to S x S pixels and C channels, S = settings.size and C = settings.channels.

    | `fit`     | an image of H x W                                                                        |
    |-----------|------------------------------------------------------------------------------------------|
    | `pad`     | is centred on black, never scaled                                                        |
    | `contain` | the same; one that is larger than S x S is scaled down before, with its aspect ratio kept |
    | `resize`  | is scaled to S x S, whatever its aspect ratio                                            |

    Scaling is bicubic with antialiasing. Grey images are repeated into RGB; RGB images are reduced to their luma. Each
    image is converted on its own, independently of the others.

    Args:
        pixels: uint8 (N, H, W) or (N, H, W, 3); returned if they have the form.
        settings: target size and channels.

    Returns:
        uint8 (N, S, S) or (N, S, S, 3); mapped from a scratch file if they are large.

    Raises:
        TooLargeError: H or W is larger than S and `fit` is `pad`.
    """
    size, channels = settings.size, 1 if pixels.ndim == 3 else 3
    if settings.fit == "pad" and max(pixels.shape[1:3]) > size:
        raise TooLargeError(_too_large(size))
    if (*pixels.shape[1:3], channels) == (size, size, settings.channels):
        return pixels
    fitted = empty((len(pixels), *settings.shape))
    start = 0
    for block in blocks(pixels):
        fitted[start : start + len(block)] = _fit(block, settings)
        start += len(block)
    return fitted


def _too_large(size: int) -> str:
    problem = (
        f"images larger than {size}x{size} pixels do not fit, and image.fit=pad never scales; give smaller ones, or"
    )
    return f"{problem} make the model with --set image.fit=contain (image.fit=resize distorts them)"


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
    size = settings.size
    height, width = pixels.shape[1:3]
    wanted = (size, size) if settings.fit == "resize" else _contained(width, height, size)
    if wanted != (width, height):
        pixels = _resize(pixels, wanted)
    if pixels.shape[1:3] != (size, size):
        pixels = _pad(pixels, size)
    if settings.channels == 1 and pixels.ndim == 4:
        pixels = np.rint(pixels @ LUMA).astype(np.uint8)
    elif settings.channels == 3 and pixels.ndim == 3:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    return pixels


def _contained(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of an image within size x size: those that it has, or the largest with its aspect ratio."""
    longest = max(width, height)
    if longest <= size:
        return width, height
    # a line of one pixel stays one
    return max(1, round(width / longest * size)), max(1, round(height / longest * size))


def _pad(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    height, width = pixels.shape[1:3]
    top, left = (size - height) // 2, (size - width) // 2
    margins = [(0, 0), (top, size - height - top), (left, size - width - left)]
    return np.pad(pixels, margins + [(0, 0)] * (pixels.ndim - 3))


def _resize(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    return np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BICUBIC)) for p in pixels])
