"""The classifier of a bundle; implements `rapid.sampling.classifier.Classifier`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import to_unit_range
from rapid.methods.dp_classifier.public_stage import CLASSIFIER
from rapid.nn.wide_resnet import WideResNet
from rapid.runtime import place

BATCH = 256
"""Images at a time."""


class WideResNetClassifier:
    """Probabilities of classes by the network of a public or a private bundle.

    Args:
        bundle: as it was opened.
        device: where the network runs.

    Attributes:
        bundle: as given.
        classes: their names.
        image_shape: (H, W) or (H, W, 3).
    """

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self.bundle = bundle
        network = bundle.component(CLASSIFIER, WideResNet)
        # of the network: those of a public bundle are apart where several sets share a name
        self.classes = network.classes
        self.image_shape = bundle.image_shape
        self._network = place(network, device)
        self._device = device

    @torch.no_grad()
    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `rapid.sampling.classifier.Classifier`."""
        found = np.empty((len(images), len(self.classes)), np.float32)
        for start in range(0, len(images), BATCH):
            x = to_unit_range(images[start : start + BATCH], self._device)
            logits = self._network(x.contiguous(memory_format=torch.channels_last))
            found[start : start + BATCH] = logits.double().softmax(1).float().cpu().numpy()
        return found
