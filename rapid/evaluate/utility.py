"""Downstream utility: classifiers are trained on one set of images and tested once on another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rapid.data import ImageSet
from rapid.evaluate.networks import CLASSIFIERS, PROTOCOL
from rapid.evaluate.sets import match_classes
from rapid.evaluate.training import BATCH, EPOCHS, labels_of, predict, train_classifier

Json = dict[str, Any]


def protocol_in_words(epochs: int) -> str:
    """A description of `measure_utility` for the report."""
    return (
        f"Each classifier is trained for {epochs} epochs (AdamW, one-cycle learning rate, batches of {BATCH}, no "
        "augmentation) on nine tenths of the training set; the other tenth selects the best epoch, which is tested "
        "once on the real test images. The mean is over the ResNet, the WideResNet and the ResNeXt, without the small "
        "CNN. Standard errors reflect the size of the test set only; each network is trained once."
    )


def measure_utility(
    train: ImageSet,
    test: ImageSet,
    device: torch.device,
    title: str,
    names: Sequence[str] = tuple(CLASSIFIERS),
    epochs: int = EPOCHS,
) -> Json:
    """Train each classifier on `train` and test it once on `test`.

    Args:
        train: labelled images.
        test: labelled images of the same size and colour mode; classes are matched by name.
        device: where to train.
        title: name of the training set, shown with the progress.
        names: keys of `CLASSIFIERS`.
        epochs: passes over the training set.

    Returns:
        JSON-ready. `networks` has, for each name, the accuracy on `test` in [0, 1], overall and by class, and the
        confusion counts (a row per class of `test`, a column per class of `train`). `mean` is the mean accuracy of
        `PROTOCOL`, None unless all of its networks were trained.

    Raises:
        InputError: a set is unlabelled, or `test` has a class that `train` does not have.
    """
    truth, labels = match_classes(train, test), labels_of(test)
    networks: dict[str, Json] = {}
    for name in names:
        trained = train_classifier(name, train, device, f"{name}, {title}", epochs)
        predicted = predict(trained.network, test.images, device)
        confusion = np.zeros((len(test.classes), len(train.classes)), np.int64)
        np.add.at(confusion, (labels, predicted), 1)
        accuracy = float((predicted == truth).mean())
        networks[name] = {
            "network": CLASSIFIERS[name].title,
            "parameters": sum(p.numel() for p in trained.network.parameters()),
            "accuracy": accuracy,
            "standard_error": (accuracy * (1 - accuracy) / len(truth)) ** 0.5,
            "held_out_accuracy": trained.held_out_accuracy,
            "best_epoch": trained.epoch,
            "seconds": round(trained.seconds, 1),
            "accuracy_by_class": {
                label: float((predicted[labels == number] == truth[labels == number]).mean())
                for number, label in enumerate(test.classes)
                if (labels == number).any()
            },
            "confusion": confusion.tolist(),
        }
    complete = all(name in networks for name in PROTOCOL)
    mean = float(np.mean([networks[name]["accuracy"] for name in PROTOCOL])) if complete else None
    return {
        "trained_on": title,
        "images": len(train),
        "classes": list(train.classes),
        "test_classes": list(test.classes),
        "networks": networks,
        "mean": mean,
    }
