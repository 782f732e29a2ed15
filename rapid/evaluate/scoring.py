"""The score of a candidate: how a classifier that has seen only its synthetic images labels other images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import ImageSet, to_unit_range
from rapid.evaluate.training import EPOCHS, train_classifier
from rapid.methods import generator_of
from rapid.sampling.generate import generate

NETWORK = "small"
"""Of `rapid.evaluate.networks.CLASSIFIERS`: it is trained in every trial."""


def train_labeller(bundle: Path, device: torch.device, count: int) -> Callable[[Tensor], Tensor]:
    """Generate images, and train a classifier on them.

    Args:
        bundle: a finished bundle with classes, that makes images.
        device: where to generate and train.
        count: of synthetic images, at least 3.

    Returns:
        images, uint8 (n, H, W) or (n, H, W, 3) -> logits of the bundle's classes, float (n, classes), on the CPU.

    Raises:
        InputError: the bundle makes no images.
        Stopped: a stop was requested.
    """
    generator = generator_of(Bundle.open(bundle, "model"), device)
    made = generate(generator, count)
    images = ImageSet(made.images, made.labels, generator.classes, "synthetic images")
    # on the CPU the result for an image does not depend on those beside it, but for rounding
    network = train_classifier(NETWORK, images, device, "score", EPOCHS).network.cpu().eval()

    @torch.no_grad()
    def logits(rows: Tensor) -> Tensor:
        found: Tensor = network(to_unit_range(rows.numpy(), torch.device("cpu")))
        return found

    return logits
