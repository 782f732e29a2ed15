"""Training of the probe's features on labelled public images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.config.sections import ImageSettings, ProbeSettings
from rapid.data import to_unit_range
from rapid.data.augment import drawn, transformed
from rapid.data.subset import Images
from rapid.mapped import release
from rapid.probe.network import Probe
from rapid.ranks import Ranks
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.public import train
from rapid.training.recipe import Recipe

HIDDEN = 128
LABEL_SMOOTHING = 0.1
BATCH = 500


class ProbeRecipe(Recipe):
    """All inputs of the features."""

    image: ImageSettings
    probe: ProbeSettings


def train_features(
    recipe: ProbeRecipe,
    images: Images,
    labels: NDArray[np.int64],
    num_classes: int,
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> Probe:
    """Train the trunk to classify augmented public images; then set projection and prototypes.

    Classes are drawn equally often, however many images they have.

    Args:
        recipe: shape and training.
        images: D_pre, uint8 (N, H, W) or (N, H, W, 3).
        labels: int64 (N,).
        num_classes: number of public classes.
        device: where to train.
        checkpoint: of the training state.
        ranks: the processes that share each batch.
    """
    torch.manual_seed(4)
    own, ranks = recipe.probe, ranks or Ranks()
    model = Probe.build(recipe.image, own, num_classes).to(device)
    head = nn.Sequential(nn.Linear(model.widths[0], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_classes)).to(device)
    network = nn.ModuleDict({"trunk": model.trunk, "head": head})
    counts = torch.from_numpy(np.bincount(labels, minlength=num_classes)).double()
    # of all images up to each: torch.multinomial takes at most 2^24, and sums them anew for each batch
    summed = (1 / counts.clamp_min(1))[torch.from_numpy(labels)].cumsum(0)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count = own.training.batch_size
        chosen = draw_rows(summed, count, generator)[ranks.rows].numpy()
        draws = drawn(count, generator)[:, ranks.rows].to(device)
        views = transformed(to_unit_range(images[chosen], device), own.augment, draws)
        return views, torch.from_numpy(labels[chosen]).to(device)

    def value(views: Tensor, targets: Tensor) -> Tensor:
        mean = F.cross_entropy(head(model.trunk(views)), targets, label_smoothing=LABEL_SMOOTHING)
        return mean * ranks.weight(own.training.batch_size)

    train("probe", network, Loss(draw, value), own.training, checkpoint, ranks=ranks)
    model.eval()
    model.fit_projection(_moments(model, images, device))
    model.prototypes.copy_(class_prototypes(model, images, labels, num_classes, device))
    return model


@torch.no_grad()
def class_prototypes(
    probe: Probe, images: Images, labels: NDArray[np.int64], num_classes: int, device: torch.device
) -> Tensor:
    """Mean features of each class, float (num_classes, d + 1); 0 for a class without images.

    Args:
        probe: on `device`.
        images: uint8 (N, H, W) or (N, H, W, 3).
        labels: int64 (N,).
        num_classes: number of classes.
        device: where to compute.
    """
    index = torch.from_numpy(labels).to(device)
    sums = torch.zeros(num_classes, probe.prototypes.shape[1], device=device)
    for part, numbers in zip(_parts(images), index.split(BATCH), strict=True):
        sums.index_add_(0, numbers, probe.features(to_unit_range(part, device)))
    return sums / torch.bincount(index, minlength=num_classes).clamp_min(1)[:, None]


@torch.no_grad()
def probe_features(probe: Probe, images: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Features of all images, float (N, d + 1), on `device`; N may be 0."""
    parts = [probe.features(to_unit_range(part, device)) for part in _parts(images)]
    return torch.cat(parts) if parts else torch.zeros(0, probe.prototypes.shape[1], device=device)


def draw_rows(summed: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices of images, int64 (count,), with replacement, by the running sum of their weights, float64 (N,)."""
    uniform = torch.rand(count, dtype=torch.float64, generator=generator) * summed[-1]
    return torch.searchsorted(summed, uniform, right=True).clamp_max(len(summed) - 1)


@torch.no_grad()
def _moments(probe: Probe, images: Images, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Mean and covariance of the outputs of each stage, float64 (F,) and (F, F), in bounded memory."""
    sums = [torch.zeros(width, dtype=torch.float64, device=device) for width in probe.widths]
    products = [torch.zeros(width, width, dtype=torch.float64, device=device) for width in probe.widths]
    for part in _parts(images):
        for number, outputs in enumerate(probe.outputs(to_unit_range(part, device))):
            exact = outputs.double()
            sums[number] += exact.sum(0)
            products[number] += exact.T @ exact
    pairs = [(total / len(images), product / len(images)) for total, product in zip(sums, products, strict=True)]
    return [(mean, second - torch.outer(mean, mean)) for mean, second in pairs]


def _parts(images: Images) -> Iterator[NDArray[Any]]:
    for start in range(0, len(images), BATCH):
        yield images[start : start + BATCH]
        release()
