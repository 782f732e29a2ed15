"""Votes of private images for clusters of candidates: one noisy histogram after DP-SGD.

The candidates of each class that the probe accepts are clustered in the probe's features. Each private image votes for
the cluster of its class whose centre is nearest. Votes of a cluster over its number of candidates estimate how much
denser private images are there than the model's: training on candidates by these weights brings back what the model
draws too rarely, and takes away what it draws too often. Private Evolution (Lin et al., ICLR 2024) lets private images
vote for single images; clusters need less budget.

Formal guarantee: one `histogram` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import cluster_centres
from torch import Tensor

from rapid.data import to_unit_range
from rapid.dp.access import PrivateAccess
from rapid.dp.releases import QuerySpec
from rapid.methods.rapid.candidates import Candidates
from rapid.probe.network import Probe
from rapid.training import Checkpoint

NAME = "votes"
VOTES_OF_A_CLUSTER = 4.0
"""Expected, in standard deviations of the noise."""
MOST_CLUSTERS, CANDIDATES_OF_A_CLUSTER = 128, 8
"""Of a class, at most; of candidates that are accepted, on average at least."""
BATCH = 500


def votes_spec(share: float, dataset_size: int) -> QuerySpec:
    """The release of the votes."""
    return QuerySpec(
        name=NAME,
        kind="histogram",
        title="votes of the images for clusters of candidates of their class, in the features of the probe",
        share=share,
        dataset_size=dataset_size,
    )


@dataclass(frozen=True, eq=False)
class Votes:
    """The result of a vote; no longer private.

    Attributes:
        centres: of the clusters, float32 (classes, m, d).
        sizes: number of clusters of each class, int64 (classes,); the other centres mean nothing.
        counts: votes, 0 where they are not above the noise, float64 (classes, m).
    """

    centres: Tensor
    sizes: Tensor
    counts: Tensor

    def weights(self, features: Tensor, labels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Votes of each image's cluster over the number of these images in it, float64 (n,).

        Args:
            features: of the images, float (n, d).
            labels: their classes, int64 (n,).
        """
        bins = nearest_centres(features, torch.from_numpy(labels), self.centres, self.sizes)
        images = torch.bincount(bins, minlength=self.counts.numel())
        found: NDArray[np.float64] = (self.counts.flatten() / images.clamp_min(1))[bins].numpy()
        return found


def nearest_centres(features: Tensor, labels: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """The cluster of each row among those of its class, int64 (n,) on the CPU: class * m + cluster.

    In double precision, so that a row's cluster does not depend on the rows beside it.

    Args:
        features: float (n, d).
        labels: int64 (n,).
        centres: float (classes, m, d).
        sizes: number of clusters of each class, int64 (classes,).
    """
    rows, labels = features.detach().cpu().double(), labels.cpu()
    count = centres.shape[1]
    nearest = torch.zeros(len(rows), dtype=torch.int64)
    for number in labels.unique().tolist():
        own = labels == number
        known = centres[number, : max(1, int(sizes[number]))].double()
        nearest[own] = (known.square().sum(1) - 2 * rows[own] @ known.T).argmin(1)
    return labels * count + nearest


@torch.no_grad()
def image_features(probe: Probe, images: NDArray[np.uint8], device: torch.device) -> Tensor:
    """The probe's features of images, float32 (n, d) on the CPU."""
    parts = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    found = [probe.features(to_unit_range(part, device)).float().cpu() for part in parts]
    return torch.cat(found) if found else torch.zeros(0, probe.prototypes.shape[1])


def release_votes(
    access: PrivateAccess, probe: Probe, candidates: Candidates | None, checkpoint: Checkpoint | None
) -> Votes:
    """Let the private images vote.

    Args:
        access: its budget lists the release of `votes_spec`; its images are labelled.
        probe: with a linear layer for the private classes.
        candidates: on the first rank; None on the others.
        checkpoint: of the clusters, on the first rank: a run that was stopped goes on with the same.
    """
    noise = access.budget.release(NAME).noise_stddev
    device = access.device
    state = {} if checkpoint is None else checkpoint.load() or {}
    if candidates is not None and not state:
        classes = len(access.facts.classes)
        expected = access.facts.dataset_size / classes
        most = int(max(1, min(MOST_CLUSTERS, expected / (VOTES_OF_A_CLUSTER * noise))))
        centres, sizes = cluster_candidates(probe, candidates, most, device)
        state = {"step": 1, "centres": centres, "sizes": sizes}
        if checkpoint is not None:
            checkpoint.save(state)
    state = access.ranks.broadcast_state(state)
    centres, sizes = state["centres"], state["sizes"]
    features = access.map(
        lambda images: probe.features(to_unit_range(images.numpy(), device)).cpu(), access.images, title="features"
    )
    counts = access.histogram(
        NAME,
        centres.shape[0] * centres.shape[1],
        lambda rows, labels: nearest_centres(rows, labels, centres, sizes),
        features,
        access.labels,
    )
    return Votes(centres, sizes, torch.where(counts > noise, counts, 0.0).view(centres.shape[:2]))


def cluster_candidates(probe: Probe, candidates: Candidates, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Centres of the clusters of each class, float32 (classes, m, d), and how many each class has, int64 (classes,).

    Args:
        probe: whose features are clustered.
        candidates: of which those that are accepted are clustered.
        most: clusters of a class.
        device: where to compute.
    """
    classes = candidates.probabilities.shape[1]
    features = image_features(probe.to(device), candidates.images[candidates.accepted], device).numpy()
    labels = candidates.wanted[candidates.accepted]
    found = []
    for number in range(classes):
        own = features[labels == number]
        found.append(cluster_centres(own, max(1, min(most, len(own) // CANDIDATES_OF_A_CLUSTER)), seed=number))
    centres = torch.zeros(classes, max(1, *map(len, found)), features.shape[1])
    for number, rows in enumerate(found):
        centres[number, : len(rows)] = torch.from_numpy(rows)
    return centres, torch.tensor([len(rows) for rows in found])
