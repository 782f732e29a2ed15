"""The classifier of a bundle; a `rapid.sampling.classifier.Classifier`."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid.bundle import Bundle
from rapid.methods.dp_classifier.public_stage import CLASSIFIER
from rapid.nn.wide_resnet import WideResNet
from rapid.runtime import place
from rapid.sampling.classifier import NetworkClassifier


class WideResNetClassifier(NetworkClassifier):
    """Probabilities of classes by the network of a public or a private bundle.

    Args:
        bundle: as it was opened.
        device: where the network runs.
    """

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        network = place(bundle.component(CLASSIFIER, WideResNet), device)

        def logits(images: Tensor) -> Tensor:
            found: Tensor = network(images.contiguous(memory_format=torch.channels_last))
            return found

        # of the network: those of a public bundle are apart where several sets share a name
        super().__init__(bundle, network.classes, device, logits)
