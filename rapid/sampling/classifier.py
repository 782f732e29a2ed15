"""Classifiers: their protocol, those of one network, and images as clients send them."""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, to_unit_range
from rapid.data.readers.form import TooDeepError, to_form
from rapid.errors import InputError
from rapid.precision import exact_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rapid.bundle import Bundle

BATCH, PIXELS = 256, 1 << 21
"""Images that a network classifies at a time, at most, and their pixels."""
LARGEST_SIDE = 2048
"""Most pixels of a side of an image that is scaled down to the model's size."""


@runtime_checkable
class Classifier(Protocol):
    """A model that classifies images, as read from a bundle."""

    @property
    def bundle(self) -> Bundle:
        """Where the model comes from: its name, digest and privacy statement."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, at least one."""
        ...

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W) or (H, W, 3)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Probability of each class, float32 (n, classes), of images of `image_shape`, uint8 (n, ...); n may be 0."""
        ...


class NetworkClassifier:
    """A classifier whose network takes images in [-1, 1], some at a time.

    Args:
        bundle: as it was opened.
        classes: names of the network's classes.
        device: where the network runs.
        network: gives logits, float (n, classes), of images, float32 (n, C, H, W).

    Attributes:
        bundle: as given.
        classes: as given.
        image_shape: (H, W) or (H, W, 3).
        device: as given.
    """

    def __init__(
        self, bundle: Bundle, classes: tuple[str, ...], device: torch.device, network: Callable[[Tensor], Tensor]
    ) -> None:
        self.bundle, self.classes, self.image_shape = bundle, classes, bundle.image_shape
        self.device, self._network = device, network

    @torch.no_grad()
    @exact_float32()
    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `Classifier`."""
        found = np.empty((len(images), len(self.classes)), np.float32)
        count = max(1, min(BATCH, PIXELS // math.prod(self.image_shape[:2])))
        for start in range(0, len(images), count):
            logits = self._network(to_unit_range(images[start : start + count], self.device))
            found[start : start + count] = logits.double().softmax(1).float().cpu().numpy()
        return found


def read_png(content: bytes, settings: ImageSettings, field: str) -> NDArray[np.uint8]:
    """Read an image that a client sent, in the form of the model; uint8 (1, S, S) or (1, S, S, 3).

    Its size is checked before its pixels are read.

    Args:
        content: a PNG file.
        settings: the form of the model.
        field: name of the argument that gave it; for messages.

    Raises:
        InputError: not a PNG, damaged, or too large.
    """
    most = settings.size if settings.fit == "pad" else max(settings.size, LARGEST_SIDE)
    try:
        # Pillow warns of very large images, which are refused here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=["PNG"])
    except MemoryError:
        raise
    except Exception:
        raise InputError(field, "should be a PNG file") from None
    with image:
        width, height = image.size
        if max(width, height) > most:
            raise InputError(field, f"is {width}x{height} pixels; the model takes at most {most}x{most}")
        try:
            pixels = to_form(image).pixels
        except TooDeepError:
            raise InputError(field, "has 32 bits a channel; send 8 or 16") from None
        except MemoryError:
            raise
        except Exception:
            # Pillow raises many kinds of errors for damaged files
            raise InputError(field, "is a damaged PNG file") from None
    return fit_images(ImageSet(pixels[None], None, ()), settings, field).images
