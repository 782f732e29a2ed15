"""The distances between the sets of an evaluation: in the features of a small network, and as DPImageBench has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.data import ImageSet
from rapid.evaluate.comparisons import Compared, choose, compared_sets
from rapid.evaluate.features import FeatureSpace
from rapid.evaluate.fidelity import NEIGHBOURS, Balls
from rapid.evaluate.inception import Inception, inception_features, inception_score
from rapid.evaluate.sets import Sets
from rapid.files import content_hash
from rapid.frechet import Features, frechet_distance
from rapid.progress import Progress
from rapid.sampling.generator import Generator

FID_IMAGES = 50_000
"""DPImageBench draws so many of the synthetic images for the FID; precision, recall and Inception Score take all."""
OTHER_NEIGHBOURS = 3
"""DPImageBench's precision and recall have 4 neighbours, of which an image itself is the first."""

Json = dict[str, Any]


def measure_fidelity(space: FeatureSpace, compared: dict[str, Compared], real: ImageSet, device: torch.device) -> Json:
    """Compare sets with the real test images in the features of a small network.

    Args:
        space: the features.
        compared: see `compared_sets`.
        real: the real test images.
        device: where to compute.

    Returns:
        JSON-ready: `features` in words, `k`, the title of each set in `sets`, and under its name what was measured.
    """
    vectors = space.extract(real.images, "features, test")
    found: Json = {
        "features": space.words,
        "k": NEIGHBOURS,
        "sets": {name: one.title for name, one in compared.items()},
    }
    with Progress("neighbours, test", len(vectors), "image") as progress:
        balls = Balls(vectors, NEIGHBOURS, device, progress.advance)
    for name, (_, images) in compared.items():
        own = space.extract(images.images, f"features, {name}")
        with Progress(f"neighbours, {name}", len(vectors) + len(own), "image") as progress:
            measures = balls.compared(own, progress.advance)
        found[name] = {
            "images": len(images),
            "real_images": len(real),
            "frechet": frechet_distance(own, vectors),
            **measures._asdict(),
            "frechet_by_class": _frechet_by_class(images, own, real, vectors),
        }
    return found


def _frechet_by_class(
    images: ImageSet, vectors: Features, real_images: ImageSet, real: Features
) -> dict[str, float | None] | None:
    """By class name; None without labels, and for a class with fewer than two images in either set."""
    if images.labels is None or real_images.labels is None:
        return None
    distances: dict[str, float | None] = {}
    for number, name in enumerate(real_images.classes):
        own = images.classes.index(name) if name in images.classes else -1
        first, second = vectors[images.labels == own], real[real_images.labels == number]
        distances[name] = frechet_distance(first, second) if min(len(first), len(second)) > 1 else None
    return distances


def measure_fid(network: Inception, weights: Path, sets: Sets, model: Generator | None, device: torch.device) -> Json:
    """Compare sets with the real training images, or with the test images if there are none, as DPImageBench does.

    Its reference are the private training images, in their own size: a frame of black around them is cut off again.
    Its figures are of 60,000 synthetic images.

    Args:
        network: with the published weights.
        weights: their file.
        sets: the images.
        model: the generator, for the floors.
        device: where to compute.

    Returns:
        JSON-ready: file and hash of the `weights`, the `reference`, the `size` of the images, the title of each set in
        `sets`, and under its name `fid` with the number of images it was measured on, `precision`, `recall` and
        `inception_score` of `images`.
    """
    training = sets.train_real is not None
    reference = sets.real if sets.train_real is None else sets.train_real
    # a model that distorts images has no frame to cut off
    size = sets.real_size if model is None or model.bundle.config.image.fit != "resize" else sets.form.size
    pixels = cropped(reference.images, size)
    real = inception_features(network, pixels, device, "inception, reference").astype(np.float64)
    compared = compared_sets(sets, model, device, against_training=training)
    found: Json = {
        "weights": weights.name,
        "sha256": content_hash(weights),
        "reference": "real training images" if training else "real test images",
        "reference_images": len(reference),
        "size": size,
        "sets": {name: one.title for name, one in compared.items()},
    }
    with Progress("neighbours, reference", len(real), "image") as progress:
        balls = Balls(real, OTHER_NEIGHBOURS, device, progress.advance)
    for name, (_, images) in compared.items():
        own = inception_features(network, cropped(images.images, size), device, f"inception, {name}")
        rows, doubles = choose(len(own), FID_IMAGES), own.astype(np.float64)
        with Progress(f"neighbours, {name}", len(real) + len(own), "image") as progress:
            near = balls.compared(doubles, progress.advance)
        found[name] = {
            "fid": frechet_distance(doubles[rows], real),
            "fid_images": len(rows),
            "images": len(own),
            "precision": near.precision,
            "recall": near.recall,
            "inception_score": inception_score(network, own, device),
        }
    return found


def cropped(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The central size x size pixels of images of at least that size: what `fit_images` framed with black."""
    start = (images.shape[1] - size) // 2
    return images[:, start : start + size, start : start + size]
