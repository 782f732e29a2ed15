"""Which augmentations leave public images as likely as they were: what a classifier cannot tell apart is a symmetry."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rapid.data.fit import to_unit_range

SAMPLE = 4000
"""Images that are looked at."""
SIDE = 12
"""Images are reduced to this many pixels a side."""
RIDGE = 0.03
"""Regularisation, relative to the mean variance of a pixel."""
FAINT, STROKE = 25, 150
"""Contrasts with the background beyond which a pixel counts as drawn, and as one of a stroke. Of the drawn pixels of
letters, digits and Devanagari characters 61 to 71 % belong to strokes."""
TOLERANCE = 0.06
"""Accuracy over one half up to which original and transformed images count as alike."""


def mirrored_alike(images: NDArray[np.uint8]) -> bool:
    """Whether images mirrored left to right look like the originals: photographs do, writing does not.

    Args:
        images: PUBLIC images, uint8 (N, H, W) or (N, H, W, 3).
    """
    return _alike(images, lambda x: x.flip(3))


def turned_alike(images: NDArray[np.uint8]) -> bool:
    """Whether images turned by 90 degrees look like the originals: cells under a microscope do."""
    return _alike(images, lambda x: x.rot90(1, (2, 3)))


def content_box(images: NDArray[np.uint8]) -> tuple[slice, slice]:
    """The rows and columns within the black frame that all images have, as from padding; all rows and columns of black.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3).
    """
    seen: NDArray[np.bool_] = np.any(images, 0).reshape(*images.shape[1:3], -1).any(2)
    if not seen.any():
        return slice(0, images.shape[1]), slice(0, images.shape[2])
    rows, columns = (np.flatnonzero(seen.any(axis)) for axis in (1, 0))
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


def content_share(images: NDArray[np.uint8]) -> float:
    """The share of all pixels within `content_box`."""
    rows, columns = content_box(images)
    share: float = (rows.stop - rows.start) * (columns.stop - columns.start) / math.prod(images.shape[1:3])
    return share


def has_plain_background(images: NDArray[np.uint8]) -> bool:
    """Whether most pixels within the frame have one value, as in drawings, writing and many masks."""
    sample = _content(images)
    counts = np.bincount(sample.reshape(-1), minlength=256)
    return bool(counts.max() > 0.4 * counts.sum())


def has_strokes(images: NDArray[np.uint8]) -> bool:
    """Whether images are strokes of one brightness on a plain background: writing has few greys, a scan on black many.

    Args:
        images: PUBLIC images, uint8 (N, H, W). A black frame that all have does not count.
    """
    sample = _content(images)
    background = int(np.bincount(sample.reshape(-1), minlength=256).argmax())
    contrast = np.abs(sample.astype(np.int64) - background)
    return has_plain_background(images) and int((contrast > STROKE).sum()) > 0.5 * int((contrast > FAINT).sum())


def _alike(images: NDArray[np.uint8], transform: Callable[[Tensor], Tensor]) -> bool:
    """Whether a ridge classifier, trained on one half of the images, cannot tell the other half from its transform."""
    pixels = to_unit_range(_sample(images))
    if min(pixels.shape[2:]) > SIDE:
        pixels = F.interpolate(pixels, (SIDE, SIDE), mode="area")
    elif pixels.shape[2] != pixels.shape[3]:
        return False
    train, test = pixels[::2], pixels[1::2]
    if len(test) < 50:
        return False
    rows, signs = _pairs(train, transform)
    centre = rows.mean(0)
    covariance = (rows - centre).T @ (rows - centre)
    covariance.diagonal().add_(RIDGE * float(covariance.diagonal().mean()) + 1e-9)
    weights = torch.linalg.solve(covariance, (rows - centre).T @ signs)
    rows, signs = _pairs(test, transform)
    accuracy = float(((rows - centre) @ weights * signs > 0).double().mean())
    return accuracy < 0.5 + TOLERANCE


def _pairs(pixels: Tensor, transform: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Rows, float64, of images and their transforms, and +1 or -1 for each."""
    rows = torch.cat([pixels.flatten(1), transform(pixels).flatten(1)]).double()
    signs = torch.ones(len(rows), dtype=torch.float64)
    signs[len(pixels) :] = -1
    return rows, signs


def _content(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Some of the images, without their frame."""
    sample = _sample(images)
    return sample[:, *content_box(sample)]


def _sample(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    chosen = np.random.default_rng(0).permutation(len(images))[:SAMPLE]
    return images[np.sort(chosen)]
