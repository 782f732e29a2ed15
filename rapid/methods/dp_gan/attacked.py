"""Scores for membership inference: how near to an image the generator comes.

The attacker has the generator, draws images from it, and takes those that have a near neighbour among them for members
(Chen, Yu, Zhang, Fritz: GAN-Leaks; CCS 2020). The discriminator is not in the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import ImageSet, to_unit_range
from rapid.nn.gan import GanGenerator
from rapid.stopping import check_stop

DRAWS = 256
"""Images of each class."""


@torch.no_grad()
def membership_scores(bundle: Bundle, images: ImageSet, device: torch.device) -> Mapping[str, NDArray[np.float64]]:
    """Minus the l2 distance to the nearest drawn image of the class, or of any class for unlabelled images."""
    network = bundle.component("generator", GanGenerator).to(device)
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for label in range(max(1, len(bundle.classes))):
        check_stop()
        latents = torch.randn(DRAWS, network.config["latent"], generator=generator).to(device)
        drawn.append(network(latents, torch.full((DRAWS,), label, device=device)).flatten(1))
    scores = np.empty(len(images))
    labels = np.full(len(images), -1) if images.labels is None else images.labels
    for label in np.unique(labels).tolist():
        check_stop()
        chosen = np.flatnonzero(labels == label)
        rows = to_unit_range(images.images[chosen], device).flatten(1)
        known = torch.cat(drawn) if label < 0 or not bundle.classes else drawn[label]
        scores[chosen] = -torch.cdist(rows, known).amin(1).double().cpu().numpy()
    return {"nearest image of the generator": scores}
