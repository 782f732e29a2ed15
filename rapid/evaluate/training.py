"""Training a classifier on labelled images: no augmentation, one schedule, the weights of the best epoch."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from rapid.data import ImageSet, to_unit_range
from rapid.errors import InputError
from rapid.evaluate.networks import Classifier, draw, seeded
from rapid.progress import Progress
from rapid.training import Trainer

EPOCHS = 8
BATCH = 128
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.01
HELD_OUT = 0.1
LEAST = 3
"""Images: batch normalisation needs two, the held-out part one."""
FEW_STEPS = 100
"""Steps of a training below which the running statistics of batch normalisation are computed anew. They are means over
about the last thirty steps: in a short training over initial values and over weights that are long gone. On 400 digits
(24 steps) the weights of a ResNeXt are right on 14 % of the test images with them, on 82 % with their own statistics;
on 1,000 digits (64 steps) on 93 % with both."""
TEMPERATURE = 3.0
"""Soft labels are softened by it (Hinton et al. 2015, equation 1); chosen on letters, where 2 and 5 do as well."""
BATCH_PREDICTED, PIXELS_PREDICTED = 500, 1 << 21
"""Images that a network sees at a time without training, at most, and their pixels."""


@dataclass(frozen=True)
class Trained:
    """A classifier with the weights of its best epoch.

    Attributes:
        network: in evaluation mode.
        epoch: the best epoch, counted from 1.
        held_out: indices of the held-out tenth, int64; the same for every network and seed.
        held_out_accuracy: in [0, 1], on the held-out tenth.
        seconds: duration of the training.
    """

    network: Classifier
    epoch: int
    held_out: NDArray[np.int64]
    held_out_accuracy: float
    seconds: float


def train_classifier(
    name: str, images: ImageSet, device: torch.device, title: str, epochs: int = EPOCHS, seed: int = 0, field: str = ""
) -> Trained:
    """Train with AdamW and a one-cycle learning rate; keep the epoch with the best accuracy on a held-out tenth.

    In a training of fewer than `FEW_STEPS` steps, the statistics of batch normalisation are computed anew after each
    epoch, over the nine tenths. Torch's global generators are left as they were.

    Args:
        name: a key of `networks.CLASSIFIERS`.
        images: labelled and square. Where they have soft labels, these are learnt, and the labels only select.
        device: where to train.
        title: shown with the progress.
        epochs: passes over nine tenths of the images, at least 1.
        seed: determines the initial weights and the order of the images.
        field: name of the argument that gave the images; for messages.

    Raises:
        InputError: fewer than three images, or no labels.
    """
    labels = torch.from_numpy(labels_of(images, field))
    if len(images) < LEAST:
        problem = f"{len(images)} images are too few to train a classifier; give at least {LEAST}"
        raise InputError(field, problem, images.source)
    # members of an ensemble have the same held-out tenth, on which the ensemble can be measured
    draws = torch.Generator().manual_seed(0)
    targets = labels if images.soft_labels is None else soften(torch.from_numpy(images.soft_labels))
    order = torch.randperm(len(images), generator=draws)
    if seed:
        draws.manual_seed(seed)
    held_out = max(1, round(HELD_OUT * len(images)))
    validation, training = order[:held_out], order[held_out:]
    # initial weights, then dropout
    with seeded(seed, device):
        network = draw(name, images.channels, images.images.shape[1], len(images.classes), device)
        batches = -(-len(training) // BATCH)
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, epochs * batches, cycle_momentum=False)
        start, best, best_epoch, weights = time.monotonic(), -1.0, 0, network.state_dict()
        # parts of nearly equal size: none has a single image
        shuffled = (
            batch
            for _ in range(epochs)
            for batch in training[torch.randperm(len(training), generator=draws)].tensor_split(batches)
        )

        def backward(step: int) -> str | None:
            network.train()
            batch = next(shuffled)
            x = _input(images.images[batch.numpy()], device)
            F.cross_entropy(network(x), targets[batch].to(device)).backward()
            return f"epoch {step // batches + 1}/{epochs}, {best:.2%} held out" if best >= 0 else None

        def keep_best(steps: int) -> None:
            nonlocal best, best_epoch, weights
            if steps % batches:
                return
            if epochs * batches < FEW_STEPS:
                _renew_statistics(network, images.images, training.tensor_split(batches), device)
            predicted = predict(network, images.images[validation.numpy()], device)
            accuracy = float((predicted == labels[validation].numpy()).mean())
            if accuracy >= best:
                best, best_epoch, weights = accuracy, steps // batches, copy.deepcopy(network.state_dict())

        trainer = Trainer(network, optimizer, schedule)
        trainer.run(epochs * batches, backward, title=title, between_steps=keep_best)
    network.load_state_dict(weights)
    return Trained(network.eval(), best_epoch, validation.numpy(), best, time.monotonic() - start)


@torch.no_grad()
def _renew_statistics(
    network: Classifier, images: NDArray[np.uint8], parts: Sequence[torch.Tensor], device: torch.device
) -> None:
    """Batch normalisation gets the mean statistics of the parts, indices of images, with the present weights."""
    normalisations = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    if not normalisations:
        return
    network.eval()
    momenta = [one.momentum for one in normalisations]
    for one in normalisations:
        one.reset_running_stats()
        # the mean of all parts since then
        one.momentum = None
        one.train()
    for part in parts:
        network(_input(images[part.numpy()], device))
    for one, momentum in zip(normalisations, momenta, strict=True):
        one.momentum = momentum


def soften(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities, float (n, classes), at `TEMPERATURE`, as if the logits were divided by it."""
    # a logit of minus infinity stays one
    return (probabilities.double().log() / TEMPERATURE).softmax(1).float()


@torch.no_grad()
def predict(network: Classifier, images: NDArray[np.uint8], device: torch.device) -> NDArray[np.int64]:
    """Most likely classes, int64 (N,), of images uint8 (N, H, W) or (N, H, W, 3). Switches to evaluation mode."""
    classes: NDArray[np.int64] = probabilities(network, images, device).argmax(1).astype(np.int64)
    return classes


@torch.no_grad()
def probabilities(network: Classifier, images: NDArray[np.uint8], device: torch.device) -> NDArray[np.float64]:
    """Probabilities of the classes, float64 (N, classes), of images as for `predict`. Switches to evaluation mode."""
    network.eval()
    parts = [network(_input(part, device)).double().softmax(1).cpu().numpy() for part in _parts(images)]
    return np.concatenate(parts)


@torch.no_grad()
def extract_features(
    network: Classifier, images: NDArray[np.uint8], device: torch.device, title: str
) -> NDArray[np.float64]:
    """The penultimate layer, float64 (N, d), of images uint8 (N, H, W) or (N, H, W, 3). `title` is shown."""
    network.eval()
    features = []
    with Progress(title, len(images), "image") as progress:
        for part in _parts(images):
            features.append(network.features(_input(part, device)).double().cpu().numpy())
            progress.advance(len(part))
    return np.concatenate(features)


def labels_of(images: ImageSet, field: str = "") -> NDArray[np.int64]:
    """The labels, int64 (N,).

    Args:
        images: the set.
        field: name of the argument that gave it; for messages.

    Raises:
        InputError: the images are unlabelled.
    """
    if images.labels is None:
        problem = "has no labels, which classifiers need; label the images, or use --classifiers none"
        raise InputError(field, problem, images.source)
    return images.labels


def _input(images: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    return to_unit_range(images, device).contiguous(memory_format=torch.channels_last)


def _parts(images: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    count = min(BATCH_PREDICTED, max(1, PIXELS_PREDICTED // math.prod(images.shape[1:3])))
    return [images[start : start + count] for start in range(0, len(images), count)]
