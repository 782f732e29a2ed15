"""The evaluation report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import rapid
from rapid.config import ImageSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.evaluate.utility import train_and_test


def report(synthetic: Path, real: Path, train_real: Path | None, device: torch.device) -> dict[str, Any]:
    """Measure synthetic images against real test images.

    Args:
        synthetic: labelled synthetic images.
        real: labelled real test images; padded to the size of the synthetic ones where they are smaller.
        train_real: real training images, for what perfect synthetic images would give.
        device: where to train the classifiers.

    Returns:
        JSON-ready: the sets, and under `utility` the test accuracy of a classifier trained on each.

    Raises:
        InputError: sets that cannot be read or do not fit together.
    """
    made = load_images(synthetic, "--synthetic")
    form = ImageSettings(size=made.images.shape[1], channels=1 if made.channels == 1 else 3)
    test = fit_images(load_images(real, "--real"), form, "--real")
    sets = {"synthetic": fit_images(made, form, "--synthetic")}
    if train_real is not None:
        sets["real"] = fit_images(load_images(train_real, "--train-real"), form, "--train-real")
    utility = {
        name: {"network": "small CNN", "accuracy": train_and_test(images, test, device, f"classifier, {name}")}
        for name, images in sets.items()
    }
    return {
        "rapid": rapid.__version__,
        "synthetic": _describe(made),
        "real": _describe(test),
        "utility": utility,
        "note": "computed from the real images without protection: for open data and public test sets only",
    }


def _describe(images: ImageSet) -> dict[str, Any]:
    return {"source": Path(images.source).name, "images": len(images), "classes": list(images.classes)}
