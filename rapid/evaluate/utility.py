"""Downstream utility: classifiers are trained on one set of images and tested once on another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from rapid.data import ImageSet
from rapid.evaluate.networks import CLASSIFIERS, PROTOCOL
from rapid.evaluate.sets import match_classes
from rapid.evaluate.training import BATCH, EPOCHS, TEMPERATURE, labels_of, probabilities, train_classifier

Json = dict[str, Any]


def protocol_in_words(epochs: int, ensemble: int = 1, *, soft_labels: bool = False) -> str:
    """A description of `measure_utility` for the report."""
    softened = (
        f"Soft labels are learnt at temperature {TEMPERATURE:g} in place of the labels, which select the epoch. "
        if soft_labels
        else ""
    )
    several = (
        f"An ensemble is {ensemble} such networks of one kind, trained with other initial weights and another order of "
        "the images; the mean of their probabilities is tested. "
        if ensemble > 1
        else ""
    )
    return (
        f"Each classifier is trained for {epochs} epochs (AdamW, one-cycle learning rate, batches of {BATCH}, no "
        "augmentation) on nine tenths of the training set; the other tenth selects the best epoch, which is tested "
        "once on the real test images. The mean is over the ResNet, the WideResNet and the ResNeXt, without the small "
        f"CNN. {several}{softened}The classifier that is best on the held-out tenth is the one that would be chosen "
        "without real images; its regret is how far it is below the best on the real test images, and the rank "
        "correlation is Spearman's, of both accuracies over the classifiers. Standard errors reflect the size of the "
        "test set only"
        f"{'' if ensemble > 1 else '; each network is trained once'}."
    )


def measure_utility(
    train: ImageSet,
    test: ImageSet,
    device: torch.device,
    title: str,
    names: Sequence[str] = tuple(CLASSIFIERS),
    epochs: int = EPOCHS,
    ensemble: int = 1,
) -> Json:
    """Train each classifier on `train` and test it once on `test`.

    Args:
        train: labelled images, with or without soft labels.
        test: labelled images of the same size and colour mode; classes are matched by name.
        device: where to train.
        title: name of the training set, shown with the progress.
        names: keys of `CLASSIFIERS`.
        epochs: passes over the training set.
        ensemble: networks of each kind; the first one is what `networks` tells of.

    Returns:
        JSON-ready. `networks` has, for each name, the accuracy on `test` in [0, 1], overall and by class, and the
        confusion counts (a row per class of `test`, a column per class of `train`); with several networks of a kind
        also those of their `ensemble`, by the mean of their probabilities. `mean` is the mean accuracy of `PROTOCOL`,
        None unless all of its networks were trained. The rest is what `judge_selection` finds.

    Raises:
        InputError: a set is unlabelled, or `test` has a class that `train` does not have.
    """
    truth, labels = match_classes(train, test), labels_of(test, "real")
    networks: dict[str, Json] = {}
    for name in names:
        members = []
        for seed in range(ensemble):
            words = f"{name}, {title}" if seed == 0 else f"{name} {seed + 1}, {title}"
            trained = train_classifier(name, train, device, words, epochs, seed)
            held_out = probabilities(trained.network, train.images[trained.held_out], device)
            members.append((trained, probabilities(trained.network, test.images, device), held_out))
        trained, tested, _ = members[0]
        predicted = tested.argmax(1)
        confusion = np.zeros((len(test.classes), len(train.classes)), np.int64)
        np.add.at(confusion, (labels, predicted), 1)
        networks[name] = {
            "network": CLASSIFIERS[name].title,
            "parameters": sum(p.numel() for p in trained.network.parameters()),
            **_accuracy(predicted, truth),
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
        if ensemble > 1:
            held_out_truth = labels_of(train)[trained.held_out]
            networks[name]["ensemble"] = {
                "members": ensemble,
                **_accuracy(np.mean([found for _, found, _ in members], 0).argmax(1), truth),
                "held_out_accuracy": float(
                    (np.mean([found for _, _, found in members], 0).argmax(1) == held_out_truth).mean()
                ),
                "accuracies": [float((found.argmax(1) == truth).mean()) for _, found, _ in members],
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
        **judge_selection(networks),
    }


def standard_error(right: int, count: int) -> float:
    """Standard error of an accuracy; not 0 where all are right, of which a finite test set is no proof.

    Agresti and Coull (The American Statistician, 1998): as if four more images had been tested, and half of them right.

    Args:
        right: number of images that were classified right.
        count: of all images, at least 1.
    """
    share = (right + 2) / (count + 4)
    return math.sqrt(share * (1 - share) / (count + 4))


def _accuracy(predicted: NDArray[np.integer[Any]], truth: NDArray[np.int64]) -> Json:
    right = int((predicted == truth).sum())
    return {"accuracy": right / len(truth), "standard_error": standard_error(right, len(truth))}


def judge_selection(networks: dict[str, Json]) -> Json:
    """Whether held-out images of the training set choose a classifier that is good on real images.

    Args:
        networks: as `measure_utility` returns them; where a kind has an ensemble, that is what is chosen from.

    Returns:
        JSON-ready. `selected` is the best on the held-out images, `best` the best on the real ones, each with `name`,
        `network`, `members`, `held_out_accuracy` and `accuracy`. `regret` is the accuracy of `best` minus that of
        `selected`. `rank_correlation` is Spearman's, of held-out against real accuracy, with mean ranks for ties; None
        with fewer than three classifiers, or if all are equal in one of the two.
    """
    offered = [
        {
            "name": name,
            "network": found["network"],
            "members": found.get("ensemble", {}).get("members", 1),
            "held_out_accuracy": found.get("ensemble", found)["held_out_accuracy"],
            "accuracy": found.get("ensemble", found)["accuracy"],
        }
        for name, found in networks.items()
    ]
    selected = max(offered, key=lambda one: float(one["held_out_accuracy"]))
    best = max(offered, key=lambda one: float(one["accuracy"]))
    held_out, real = ([one[measure] for one in offered] for measure in ("held_out_accuracy", "accuracy"))
    # a constant has no ranks to correlate
    ranked = len(offered) >= 3 and len(set(held_out)) > 1 and len(set(real)) > 1
    return {
        "selected": selected,
        "best": best,
        "regret": best["accuracy"] - selected["accuracy"],
        "rank_correlation": float(spearmanr(held_out, real).statistic) if ranked else None,
    }
