"""What public images tell about a public bundle: does the autoencoder keep detail, do retrieval and probe beat chance.

All of it is measured on public images that the network in question was not trained on. No generated image is better
than what the autoencoder keeps: an error of pixels, and a Frechet distance in the features of the probe.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.data import to_unit_range
from rapid.data.augment import augment
from rapid.data.fit import from_planes, to_planes
from rapid.data.subset import Images
from rapid.data.symmetry import content_share
from rapid.diffusion import Schedule
from rapid.diffusion.losses import info_nce
from rapid.frechet import frechet_distance
from rapid.methods.rapid.networks import one_step_query
from rapid.methods.rapid.retrieval import Recall, RetrievalAccuracy
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.precision import exact_float32
from rapid.probe.features import probe_features
from rapid.probe.network import Probe

SAMPLE = 2000
BATCH = 250
FEWEST_STEPS = 200
"""Of the denoiser: with fewer it has hardly begun."""
LOSSY = 25.0
"""PSNR, dB, below which fine detail of small images is gone to the eye."""
NOTHING_LEARNT = 0.98
"""Loss of the trajectory encoder, as a share of that by chance, above which it has learnt nothing."""
LOW_RECALL = 0.9
"""Share of the nearest records that an approximate index finds, below which it is told what finds more."""
FEW_CLASSES = 0.25
"""Share of the way from chance to 1 that is clearly above chance, whatever the number of classes."""
STANDARD_ERRORS = 4.0
"""How far above chance a rate must lie to count."""


class Contrast(NamedTuple):
    """A figure and what chance alone would give."""

    value: float
    chance: float


class Floor(NamedTuple):
    """Squared Frechet distances of public images."""

    decoded: float
    """Between images and what the autoencoder makes of them."""
    halves: float
    """Between two halves of the images, chosen at random: what their number alone gives."""


class Searched(NamedTuple):
    """What is measured of retrieval."""

    records: int
    """In the knowledge base."""
    encoder: Contrast | None
    """None with a single image."""
    accuracy: RetrievalAccuracy | None
    """None without labels."""
    recall: Recall | None
    """None with an exact index."""


@torch.no_grad()
def autoencoder_psnr(autoencoder: Autoencoder, images: Images, device: torch.device) -> float:
    """PSNR, dB, of images after encoding and decoding, of the mean squared error of all; infinity without any error.

    Pixels count within the black frame that all images may have from padding: it is nearly free of errors.

    Args:
        autoencoder: on `device`.
        images: uint8 (N, H, W) or (N, H, W, 3), N >= 1.
        device: where to compute.
    """
    total, count = 0.0, 0
    sample = images[_rows(len(images))]
    for start in range(0, len(sample), BATCH):
        x = to_unit_range(sample[start : start + BATCH], device)
        decoded = autoencoder.decode(autoencoder.encode(x)).clamp(-1, 1)
        total += float((decoded - x).double().square().sum())
        count += x.numel()
    return 10 * math.log10(4 * count * content_share(sample) / total) if total else math.inf


@torch.no_grad()
def autoencoder_frechet(autoencoder: Autoencoder, probe: Probe, images: Images, device: torch.device) -> Floor | None:
    """Frechet distances in the features of the probe, without its constant. None for fewer than four images.

    Args:
        autoencoder: on `device`.
        probe: on `device`.
        images: uint8 (N, H, W) or (N, H, W, 3).
        device: where to compute.
    """
    sample = images[_rows(len(images))]
    if len(sample) < 4:
        return None
    parts = [to_unit_range(sample[start : start + BATCH], device) for start in range(0, len(sample), BATCH)]
    planes = torch.cat([to_planes(autoencoder.decode(autoencoder.encode(x))) for x in parts])
    own, decoded = (
        probe_features(probe, pixels, device)[:, :-1].double().cpu().numpy()
        for pixels in (sample, from_planes(planes.cpu().numpy()))
    )
    # the sample is in the order of the images, which may be that of their classes
    first, second = np.array_split(np.random.default_rng(9).permutation(len(own)), 2)
    return Floor(frechet_distance(own, decoded), frechet_distance(own[first], own[second]))


@torch.no_grad()
@exact_float32()
def encoder_loss(
    settings: RapidSettings,
    models: tuple[Autoencoder, Denoiser, TrajectoryEncoder],
    images: Images,
    device: torch.device,
) -> Contrast | None:
    """InfoNCE of pairs of views, as in training; chance is ln of the number of candidates. None for a single image.

    Args:
        settings: of the bundle.
        models: autoencoder, denoiser and encoder, on `device`.
        images: uint8 (N, H, W) or (N, H, W, 3).
        device: where to compute.
    """
    autoencoder, denoiser, encoder = models
    own, schedule = settings.encoder, Schedule.build(settings.schedule).to(device)
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randperm(len(images), generator=generator)[: own.training.batch_size]
    if len(chosen) < 2:
        return None
    x = to_unit_range(images[chosen.numpy()], device)

    def view() -> torch.Tensor:
        latents = autoencoder.encode(augment(x, own.augment, generator))
        eps = torch.randn(latents.shape, generator=generator).to(device)
        features: torch.Tensor = encoder(one_step_query(denoiser, schedule, latents, eps, settings.retrieval.k))
        return features

    return Contrast(float(info_nce(view(), view(), own.temperature)), math.log(2 * len(chosen) - 1))


@torch.no_grad()
def probe_accuracy(probe: Probe, images: Images, labels: NDArray[np.int64], device: torch.device) -> Contrast:
    """Share of images whose nearest prototype is that of their class; chance is the share of the largest class.

    Args:
        probe: on `device`.
        images: uint8 (N, H, W) or (N, H, W, 3), N >= 1.
        labels: int64 (N,).
        device: where to compute.
    """
    rows = _rows(len(labels))
    features, own = probe_features(probe, images[rows], device), labels[rows]
    found = torch.nn.functional.normalize(probe.prototypes[:, :-1], dim=1) @ features[:, :-1].T
    found[probe.prototypes[:, -1] == 0] = -math.inf
    hits = found.argmax(0).cpu().numpy() == own
    return Contrast(float(hits.mean()), float(np.bincount(own).max() / len(own)))


def findings(
    psnr: float, floor: Floor | None, searched: Searched | None, probe: Contrast | None, *, steps: int | None
) -> list[str]:
    """One line for each part of the bundle, with what to do where it does not work.

    Args:
        psnr: of the autoencoder, dB.
        floor: of the autoencoder; None without a probe.
        searched: of encoder and knowledge base; None where retrieval is off.
        probe: its accuracy; None without a probe.
        steps: of the denoiser's training; None if the networks are given (`--networks`), so that nothing of them can be
            changed.
    """
    given = steps is None
    lines = [f"autoencoder: {psnr:.1f} dB on public images that it was not fitted to"]
    if psnr < LOSSY:
        fix = "train your own without --networks" if given else "raise autoencoder.latent_channels, or train it longer"
        lines[0] += f"; every image will look at least this coarse: {fix}"
    if floor is not None:
        lines.append(
            f"floor: images through the autoencoder are at Frechet distance {floor.decoded:.4f} from themselves in the "
            f"features of the probe, two halves of the images at {floor.halves:.4f} from each other"
        )
    if steps is not None and steps < FEWEST_STEPS:
        how = "train it longer (--minutes, denoiser.training.steps)"
        lines.append(f"denoiser: {steps:,} steps of training are too few to learn anything: {how}")
    lines += _searched(searched, given=given)
    if probe is not None:
        line = f"probe: {probe.value:.1%} of public images are nearest to their own class, by chance {probe.chance:.1%}"
        if probe.value < clearly_above(probe.chance, 2.0):
            line += "; its features tell little: use other public classes" + ("" if given else ", or train it longer")
        lines.append(line)
    return lines


def _searched(found: Searched | None, *, given: bool) -> list[str]:
    """Lines on encoder, retrieval and index."""
    if found is None:
        return ["retrieval: off (retrieval.enabled), so there is neither trajectory encoder nor knowledge base"]
    _, encoder, retrieval, recall = found
    lines = []
    if encoder is not None:
        line = f"trajectory encoder: loss {encoder.value:.2f}, by chance {encoder.chance:.2f}"
        if encoder.value > NOTHING_LEARNT * encoder.chance:
            line += ": it tells no two trajectories apart"
            line += "" if given else "; train it longer (--minutes, encoder.training.steps)"
        lines.append(line)
    if retrieval is not None:
        line = f"retrieval: {retrieval.top1:.1%} of the nearest records have the class of their query, by chance "
        line += f"{retrieval.chance:.1%}"
        if not retrieval_works(retrieval):
            line += ": it finds nothing at this k; objectives without retrieval lose nothing (retrieval.enabled=false)"
            line += "" if given else ", or lower retrieval.k"
        lines.append(line)
    if recall is not None:
        line = f"index: finds {recall.share:.1%} of the {recall.neighbours} nearest records of {recall.queries} queries"
        if recall.share < LOW_RECALL:
            line += "; knowledge_base.index_type=flat finds all, and hnsw mostly more than ivf"
        lines.append(line)
    return lines


def retrieval_works(found: RetrievalAccuracy) -> bool:
    """Whether neighbours have the class of their query clearly more often than records drawn at random."""
    return beyond_chance(found.top1, found.chance, found.queries, 1.5)


def beyond_chance(rate: float, chance: float, count: int, factor: float) -> bool:
    """Whether a rate among `count` draws is clearly above chance, by its size and beyond its error."""
    error = math.sqrt(chance * (1 - chance) / count)
    return rate > max(chance + STANDARD_ERRORS * error, clearly_above(chance, factor))


def clearly_above(chance: float, factor: float) -> float:
    """The rate that counts as more than chance: `factor` times it, or with few classes a part of what is above it."""
    return min(factor * chance, chance + FEW_CLASSES * (1 - chance))


def as_facts(psnr: float, floor: Floor | None, searched: Searched | None, probe: Contrast | None) -> dict[str, Any]:
    """The figures of the networks, ready for JSON; see `findings` for the arguments."""
    facts: dict[str, Any] = {"autoencoder_psnr": round(psnr, 2) if math.isfinite(psnr) else None}
    if floor is not None:
        facts["autoencoder_frechet"] = {name: round(value, 6) for name, value in floor._asdict().items()}
    for name, found in (("encoder_loss", None if searched is None else searched.encoder), ("probe_accuracy", probe)):
        if found is not None:
            facts[name] = {"value": round(found.value, 4), "chance": round(found.chance, 4)}
    return facts


def _rows(count: int) -> NDArray[np.int64]:
    """Images that are looked at."""
    return np.sort(np.random.default_rng(8).permutation(count)[:SAMPLE])
