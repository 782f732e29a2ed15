"""The probe of a private bundle by itself; implements `rapid.sampling.classifier.Classifier`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import to_unit_range
from rapid.precision import exact_float32
from rapid.probe.network import COMPONENT, Probe
from rapid.runtime import place

BATCH = 256
"""Images at a time."""


class ProbeClassifier:
    """Probabilities of the private classes by the probe, which also selects the images of the bundle.

    Args:
        bundle: a private bundle with a probe.
        device: where the probe runs.

    Attributes:
        bundle: as given.
        classes: their names.
        image_shape: (H, W) or (H, W, 3).
    """

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self.bundle = bundle
        self.classes, self.image_shape = bundle.classes, bundle.image_shape
        self._probe = place(bundle.component(COMPONENT, Probe), device)
        self._device = device

    @torch.no_grad()
    @exact_float32()
    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `rapid.sampling.classifier.Classifier`."""
        found = np.empty((len(images), len(self.classes)), np.float32)
        for start in range(0, len(images), BATCH):
            x = to_unit_range(images[start : start + BATCH], self._device)
            found[start : start + BATCH] = self._probe.probabilities(x).cpu().numpy()
        return found
