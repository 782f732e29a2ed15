"""The search for copies: the nearest public, knowledge base and real image of each synthetic one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.data import ImageSet
from rapid.evaluate.neighbours import Nearest, nearest_images
from rapid.mapped import empty
from rapid.pictures import Pixels, table
from rapid.progress import Progress
from rapid.sampling.generator import Generator

PAIRS = 12
FEW = 100
"""Real images below which their nearest 1 % is a single one, and says little."""
QUANTILES = {"nearest": 0.0, "p1": 0.01, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "farthest": 1.0}

Json = dict[str, Any]


@dataclass(frozen=True)
class Closest:
    """The closest pairs of a synthetic image and its nearest image of a reference set, closest first.

    Attributes:
        reference: name of the reference set.
        synthetic: uint8 (n, H, W) or (n, H, W, 3), n <= PAIRS.
        references: the nearest reference image of each, of the same shape.
        distances: float64 (n,).
    """

    reference: str
    synthetic: NDArray[np.uint8]
    references: NDArray[np.uint8]
    distances: NDArray[np.float64]


def compare_with(
    name: str,
    synthetic: ImageSet,
    reference: NDArray[np.uint8],
    real: NDArray[np.uint8],
    device: torch.device,
    *,
    reference_is_real: bool = False,
) -> tuple[Json, Closest]:
    """Compare the distances of synthetic images to their nearest reference image with those of real test images.

    The real test images are the baseline: they were not generated from the reference. If the model copies, synthetic
    images are closer to the reference than real ones.

    Args:
        name: of the reference set.
        synthetic: the images to evaluate.
        reference: uint8, M images of the same shape.
        real: uint8, the real test images, of the same shape.
        device: where to search.
        reference_is_real: `reference` is `real`, so a real image must not be its own neighbour.

    Returns:
        JSON-ready quantiles, and the closest pairs. `nearer_than_real` is the share of synthetic images that are nearer
        to the reference than the nearest 1 % of the real ones, or identical to one of it: about 0.01 without copies,
        and None if there are fewer than FEW real ones. A pair is given by the indices of its images; several public
        sets are counted through in the order given.
    """
    with Progress(f"copies: {name}", len(synthetic) + len(real), "image") as progress:
        found = nearest_images(synthetic.images, reference, device, progress.advance)
        baseline = nearest_images(real, reference, device, progress.advance, same=reference_is_real)
    nearer = found.distances < np.quantile(baseline.distances, 0.01)
    order = _closest(found.distances, synthetic.labels)
    partners = found.indices[order]
    report = {
        "reference": name,
        "images": len(reference),
        "synthetic": _quantiles(found),
        "real": _quantiles(baseline),
        "identical": int((found.distances == 0).sum()),
        "nearer_than_real": None if len(real) < FEW else float((nearer | (found.distances == 0)).mean()),
        "closest": [
            {"synthetic": int(index), "reference": int(partner), "distance": float(found.distances[index])}
            for index, partner in zip(order, partners, strict=True)
        ],
    }
    return report, Closest(name, synthetic.images[order], reference[partners], found.distances[order])


def decode_records(generator: Generator) -> NDArray[np.uint8]:
    """The images of all knowledge base records of a model, uint8 (N, H, W) or (N, H, W, 3); N is 0 without one.

    The records are public, and sampling starts from them; what it adds comes from the private images.

    Raises:
        InputError: the knowledge base is damaged.
    """
    images = empty((generator.records, *generator.image_shape))
    with Progress("decoding records", generator.records, "record") as progress:
        for start in range(0, generator.records, generator.batch_size):
            records = np.arange(start, min(start + generator.batch_size, generator.records))
            images[records] = generator.record_images(records)
            progress.advance(len(records))
    return images


def closest_picture(closest: list[Closest]) -> Pixels:
    """Two rows for each reference set, synthetic images above their nearest reference images; uint8 RGB."""
    rows = []
    for pairs in closest:
        rows += [("synthetic", pairs.synthetic), (f"nearest: {pairs.reference}", pairs.references)]
    return table(rows, title="the closest pair of each class and the closest of all, by distance")


def _closest(distances: NDArray[np.float64], labels: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Indices of the closest image of each class and then of the closest images of all, at most PAIRS, closest first.

    Images of simple classes are close to anything; without this rule they would be the only ones shown.
    """
    order = np.argsort(distances, kind="stable")
    if labels is None:
        return order[:PAIRS]
    firsts = np.sort(np.unique(labels[order], return_index=True)[1])[:PAIRS]
    others = np.delete(np.arange(len(order)), firsts)[: PAIRS - len(firsts)]
    chosen: NDArray[np.int64] = order[np.sort(np.concatenate([firsts, others]))]
    return chosen


def _quantiles(found: Nearest) -> dict[str, float]:
    values = np.quantile(found.distances, list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, values), strict=True))
