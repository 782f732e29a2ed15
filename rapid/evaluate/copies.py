"""Whether synthetic images are copies: the nearest public, knowledge-base and real image of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.bundle.format import Bundle
from rapid.data import ImageSet, to_uint8
from rapid.diffusion import Schedule
from rapid.evaluate.neighbours import Nearest, nearest_images
from rapid.pictures import Pixels, table
from rapid.progress import Progress

PAIRS = 12
QUANTILES = {"nearest": 0.0, "p1": 0.01, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "farthest": 1.0}

Json = dict[str, Any]


@dataclass(frozen=True)
class Closest:
    """Close pairs of synthetic images and images of one reference set: of each class and of all; closest first.

    Attributes:
        reference: name of the reference set.
        synthetic: uint8 (n, H, W) or (n, H, W, 3), n <= PAIRS.
        references: the partner of each, of the same form.
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
    """The distance of every synthetic image to the nearest reference, beside that of every real test image.

    The real test images are the yardstick: they were not made from the reference. Where copies are made, synthetic
    images lie nearer to the reference than real ones do.

    Args:
        name: of the reference set.
        synthetic: to be evaluated.
        reference: uint8, M images of the same form.
        real: uint8, the real test images, of the same form.
        device: where to search.
        reference_is_real: `reference` is `real`, and no real image is its own neighbour.

    Returns:
        JSON-ready quantiles, and the closest pairs. `nearer_than_real` is the share of synthetic images that are nearer
        than the nearest 1 % of the real ones: about 0.01 if synthetic images are like real ones. Pairs are told by
        their numbers in the two sets; public sets count as one, in the order given.
    """
    with Progress(f"copies: {name}", len(synthetic) + len(real), "image") as progress:
        made = nearest_images(synthetic.images, reference, device, progress.advance)
        yardstick = nearest_images(real, reference, device, progress.advance, same=reference_is_real)
    order = _closest(made.distances, synthetic.labels)
    partners = made.indices[order]
    report = {
        "reference": name,
        "images": len(reference),
        "synthetic": _quantiles(made),
        "real": _quantiles(yardstick),
        "identical": int((made.distances == 0).sum()),
        "nearer_than_real": float((made.distances < np.quantile(yardstick.distances, 0.01)).mean()),
        "closest": [
            {"synthetic": int(index), "reference": int(partner), "distance": float(made.distances[index])}
            for index, partner in zip(order, partners, strict=True)
        ],
    }
    return report, Closest(name, synthetic.images[order], reference[partners], made.distances[order])


@torch.no_grad()
def decode_knowledge_base(bundle: Bundle, device: torch.device) -> ImageSet:
    """The images that the entries of a bundle's knowledge base stand for, unlabelled.

    Each value of step v is denoised in one step by the public denoiser, unconditionally, and decoded: what sampling
    would get from the entry without private training.

    Raises:
        InputError: the knowledge base is damaged.
    """
    autoencoder, denoiser = bundle.autoencoder().to(device), bundle.public_denoiser().to(device)
    knowledge_base, settings = bundle.knowledge_base(), bundle.settings
    schedule = Schedule.build(settings.schedule).to(device)
    size = settings.generation.batch_size
    parts = []
    with Progress("decoding entries", len(knowledge_base), "entry") as progress:
        for start in range(0, len(knowledge_base), size):
            indices = np.arange(start, min(start + size, len(knowledge_base)))
            values = torch.from_numpy(knowledge_base.values(indices)).to(device)
            t = torch.full((len(values),), settings.retrieval.v, device=device)
            noise = denoiser(values, t, denoiser.null_labels(len(values)))
            parts.append(to_uint8(autoencoder.decode(schedule.denoise(values, noise, t))))
            progress.advance(len(values))
    return ImageSet(np.concatenate(parts), None, (), str(bundle.path))


def closest_picture(closest: list[Closest]) -> Pixels:
    """Two rows for each reference set, synthetic images above their partners, one pair a column; RGB."""
    rows = []
    for pairs in closest:
        rows += [("synthetic", pairs.synthetic), (f"nearest: {pairs.reference}", pairs.references)]
    return table(rows, title="the closest pair of each class and the closest of all, by distance")


def _closest(distances: NDArray[np.float64], labels: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The closest of each class, filled up with the closest of all: simple classes are close to anything."""
    order = np.argsort(distances, kind="stable")
    chosen = order[:PAIRS]
    if labels is not None:
        firsts = np.sort(np.unique(labels[order], return_index=True)[1])[:PAIRS]
        others = np.delete(np.arange(len(order)), firsts)[: PAIRS - len(firsts)]
        chosen = order[np.sort(np.concatenate([firsts, others]))]
    return chosen


def _quantiles(found: Nearest) -> dict[str, float]:
    values = np.quantile(found.distances, list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, values), strict=True))
