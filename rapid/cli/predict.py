"""`rapid predict`: the classes of images by a classifier, as a CSV file."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid.cli.arguments import check_apart
from rapid.data import load_images, tell
from rapid.data.names import image_names
from rapid.data.readers.columns import NONE
from rapid.errors import InputError
from rapid.files import check_folder, replacing
from rapid.mapped import scratch_in
from rapid.methods import open_classifier
from rapid.progress import Progress

PORTION = 1000
"""Images whose probabilities are computed between two updates of the progress."""


def predict(options: argparse.Namespace) -> None:
    """`rapid predict`."""
    out: Path = options.out
    if out.suffix != ".csv":
        raise InputError("out", "give a name that ends in .csv", out)
    if out.is_dir():
        raise InputError("out", "is a folder; choose another name", out)
    if out.exists():
        raise InputError("out", "exists already; choose another name, or remove it first", out)
    check_apart(options, "data")
    check_folder(out.parent, "out", out)
    model = open_classifier(options.model, options.device)
    with scratch_in(out):
        loaded = load_images(options.data, "data", label_column=NONE, target=model.bundle.config.image)
    tell(loaded)
    images = loaded.images
    names = image_names(options.data, len(images))
    found = np.empty((len(images), len(model.classes)), np.float32)
    with Progress("classifying", len(images), "image") as progress:
        for start in range(0, len(images), PORTION):
            part = images[start : start + PORTION]
            found[start : start + PORTION] = model.probabilities(part)
            progress.advance(len(part))
    write_predictions(out, names, model.classes, found)
    print(f"{out}: {len(images):,} images")


def write_predictions(
    out: Path, names: Sequence[str], classes: Sequence[str], probabilities: NDArray[np.float32]
) -> None:
    """Write a row for each image: its name, the most likely class, and the probability of each class.

    Args:
        out: the CSV file; it appears when it is complete.
        names: of the images, n of them.
        classes: names of the classes.
        probabilities: float32 (n, classes).
    """
    likely = probabilities.argmax(1)
    # names of files that are not UTF-8 are written as they are
    with replacing(out) as target, target.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "label", *(f"p({name})" for name in classes)])
        for name, label, row in zip(names, likely.tolist(), probabilities.tolist(), strict=True):
            writer.writerow([name, classes[label], *(f"{value:.6g}" for value in row)])
