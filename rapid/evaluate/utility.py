"""Downstream utility: a classifier trained on one set of images and tested once on another."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data import ImageSet, to_unit_range
from rapid.errors import InputError
from rapid.progress import Progress

EPOCHS, BATCH, LEARNING_RATE = 12, 128, 1e-3
HELD_OUT = 0.1


class SmallCnn(nn.Module):
    """Two convolutions with max-pooling and a hidden layer: the classifier of the field's small-CNN protocol."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.5),
        )  # fmt: skip
        self.head = nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, classes))
        self(torch.zeros(1, channels, size, size))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of images (N, C, H, W) in [-1, 1]."""
        logits: Tensor = self.head(self.features(x))
        return logits


def train_and_test(train: ImageSet, test: ImageSet, device: torch.device, title: str = "classifier") -> float:
    """Train a `SmallCnn` on `train`, keep the epoch that is best on a held-out tenth of it, test it once on `test`.

    Args:
        train: labelled images.
        test: labelled images of the same size and channels; its classes are matched by name.
        device: where to train.
        title: shown with the progress.

    Returns:
        Accuracy on `test`, in [0, 1].

    Raises:
        InputError: unlabelled sets, other sizes, or a class of `test` that `train` does not have.
    """
    x, y = to_unit_range(train.images), torch.from_numpy(_labels(train))
    test_y = torch.from_numpy(_match_classes(train, test))
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    held_out = max(1, round(HELD_OUT * len(x)))
    validation, training = order[:held_out], order[held_out:]
    if not len(training):
        raise InputError(f"{train.source}: too few images to train a classifier")
    network = SmallCnn(x.shape[1], x.shape[2], len(train.classes)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    steps = EPOCHS * -(-len(training) // BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, best_weights = -1.0, network.state_dict()
    with Progress(title, EPOCHS, "epoch") as progress:
        for _ in range(EPOCHS):
            network.train()
            for batch in training[torch.randperm(len(training))].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(network(x[batch].to(device)), y[batch].to(device)).backward()
                optimizer.step()
                scheduler.step()
            accuracy = _accuracy(network, x[validation], y[validation], device)
            if accuracy > best:
                best, best_weights = accuracy, copy.deepcopy(network.state_dict())
            progress.advance()
    network.load_state_dict(best_weights)
    return _accuracy(network, to_unit_range(test.images), test_y, device)


@torch.no_grad()
def _accuracy(network: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> float:
    network.eval()
    right = sum(
        int((network(part.to(device)).argmax(1).cpu() == truth).sum())
        for part, truth in zip(x.split(1000), y.split(1000), strict=True)
    )
    return right / len(x)


def _labels(images: ImageSet) -> NDArray[np.int64]:
    if images.labels is None:
        raise InputError(f"{images.source}: has no labels; utility needs labelled images")
    return images.labels


def _match_classes(train: ImageSet, test: ImageSet) -> NDArray[np.int64]:
    """Labels of `test` as indices into the classes of `train`."""
    labels = _labels(test)
    if train.images.shape[1:] != test.images.shape[1:]:
        raise InputError(
            f"{test.source}: images are {test.images.shape[1:]}, those of {train.source} {train.images.shape[1:]}"
        )
    index = {name: number for number, name in enumerate(train.classes)}
    missing = [name for name in test.classes if name not in index]
    if missing:
        raise InputError(f"{test.source}: {train.source} has no class '{missing[0]}'")
    return np.array([index[name] for name in test.classes], np.int64)[labels]
