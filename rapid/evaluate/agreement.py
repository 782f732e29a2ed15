"""Label agreement: the share of images that a network trained on real images takes for their label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid.data import ImageSet
from rapid.data.classes import matched_labels
from rapid.evaluate.reference import Reference

SURE = 0.9
"""Probability of the label above which the network is sure of it."""

Json = dict[str, Any]


def network_labels(images: ImageSet, field: str, reference: Reference) -> NDArray[np.int64]:
    """Labels of images, int64 (N,), as indices into the classes of the network; classes are matched by name.

    Args:
        images: labelled.
        field: the argument that gave them, for messages.
        reference: the network.

    Raises:
        InputError: there are images of a class that the network does not know.
    """
    return matched_labels(images, reference.facts.classes, field, "the network of --features")


def measure_agreement(reference: Reference, synthetic: ImageSet, real: ImageSet) -> Json | None:
    """The share of the synthetic images that the network takes for their label, beside that of the real test images.

    Returns:
        JSON-ready: the probability from which on the network is `sure`, and `synthetic` and `real` as in `agreement`;
        `real` is None if the real images are unlabelled. None if the synthetic ones are.

    Raises:
        InputError: there are images of a class that the network does not know.
    """
    found: dict[str, Json | None] = {}
    for field, images in (("synthetic", synthetic), ("real", real)):
        if images.labels is None:
            found[field] = None
            continue
        labels = network_labels(images, field, reference)
        found[field] = agreement(reference.space.probabilities(images.images), labels, reference.facts.classes)
    return None if found["synthetic"] is None else {"sure": SURE, **found}


def agreement(probabilities: NDArray[np.float64], labels: NDArray[np.int64], classes: Sequence[str]) -> Json:
    """Compare probabilities with labels.

    Args:
        probabilities: of the classes, float64 (N, classes), N >= 1.
        labels: int64 (N,).
        classes: their names.

    Returns:
        JSON-ready: number of `images`, the share `agreed` whose most likely class is their label, the share `sure` of
        whose label the probability is above `SURE`, and the same `by_class`, for classes with images.
    """
    agreed = probabilities.argmax(1) == labels
    sure = np.take_along_axis(probabilities, labels[:, None], 1)[:, 0] > SURE

    def shares(chosen: NDArray[np.bool_]) -> Json:
        return {
            "images": int(chosen.sum()),
            "agreed": float(agreed[chosen].mean()),
            "sure": float(sure[chosen].mean()),
        }

    by_class = {name: shares(labels == number) for number, name in enumerate(classes) if (labels == number).any()}
    return {**shares(np.ones(len(labels), bool)), "by_class": by_class}
