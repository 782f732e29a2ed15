"""Votes of private images for clusters of candidates: one noisy mean after DP-SGD.

The candidates of each class that the probe accepts are clustered in the probe's features. Each private image has one
vote, which the clusters of its class share by their distance from it. Votes of a cluster over its number of candidates
estimate how much denser private images are there than the model's: training on candidates by these weights brings back
what the model draws too rarely, and takes away what it draws too often. Private Evolution (Lin et al., ICLR 2024) lets
private images vote for single images; clusters need less budget.

Votes are shared because a vote for the nearest cluster alone would jump: the last bits of features depend on where in a
batch an image is, so leaving out one image could move the votes of others.

Formal guarantee: one `mean` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import cluster_centres
from torch import Tensor
from torch.nn import functional as F

from rapid.data import to_unit_range
from rapid.dp.access import PrivateAccess
from rapid.dp.releases import QuerySpec
from rapid.methods.rapid.candidates import Candidates
from rapid.probe.features import probe_features
from rapid.probe.network import Probe
from rapid.training import Checkpoint

NAME = "votes"
VOTES_OF_A_CLUSTER = 4.0
"""Expected, in standard deviations of the noise."""
MOST_CLUSTERS, CANDIDATES_OF_A_CLUSTER = 128, 8
"""Of a class, at most; of candidates that are accepted, on average at least."""
LEAST_VARIANCE = 1e-4
"""Of a cluster, relative to the mean square of the features: candidates may be all alike."""
LEAST = 1e-300
"""Stands for 0 in a denominator."""


def votes_spec(share: float, dataset_size: int) -> QuerySpec:
    """The release of the votes."""
    return QuerySpec(
        name=NAME,
        kind="mean",
        title="votes of the images for clusters of candidates of their class, in the features of the probe",
        share=share,
        dataset_size=dataset_size,
    )


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of candidates, by class.

    Attributes:
        centres: float32 (classes, m, d).
        sizes: number of clusters of each class, int64 (classes,); the other centres mean nothing.
        variances: mean squared distance of a candidate from the nearest centre of its class, above 0, float64
            (classes,).
    """

    centres: Tensor
    sizes: Tensor
    variances: Tensor

    def shares(self, features: Tensor, labels: Tensor) -> Tensor:
        """How the clusters share the vote of each row, float32 (n, classes * m) on the CPU, not negative and of sum 1.

        These are the responsibilities of a mixture of spherical Gaussians with equal weights for each class, so they
        change continuously with the features.

        Args:
            features: float (n, d).
            labels: classes, int64 (n,).
        """
        classes, m, d = self.centres.shape
        squares = _squares(features.detach().cpu(), self.centres.flatten(0, 1)).view(-1, classes, m)
        densities = -squares * (d / 2) / self.variances[:, None]
        missing = torch.arange(m) >= self.sizes.clamp_min(1)[:, None]
        own = F.one_hot(labels.cpu(), classes)
        shares = densities.masked_fill(missing, -torch.inf).softmax(2) * own[:, :, None]
        return shares.flatten(1).float()


@dataclass(frozen=True, eq=False)
class Votes:
    """The result of a vote; no longer private.

    Attributes:
        clusters: for which the images voted.
        counts: votes with noise, float64 (classes * m,).
        noise: its standard deviation.
    """

    clusters: Clusters
    counts: Tensor
    noise: float

    def weights(self, features: Tensor, labels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Likely votes of each image's clusters over the number of these images in them, float64 (n,).

        Args:
            features: of the images, float (n, d).
            labels: their classes, int64 (n,).
        """
        shares = self.clusters.shares(features, torch.from_numpy(labels)).double()
        drawn = shares.sum(0).view(len(self.clusters.sizes), -1)
        likely = likely_votes(self.counts.view_as(drawn), drawn, self.clusters.sizes, self.noise)
        found: NDArray[np.float64] = (shares @ (likely / drawn.clamp_min(1)).flatten()).numpy()
        return found


def likely_votes(counts: Tensor, drawn: Tensor, sizes: Tensor, noise: float) -> Tensor:
    """Votes as candidates are distributed, and as much of the difference as noise does not explain (James and Stein).

    Args:
        counts: votes with noise, float64 (classes, m).
        drawn: candidates in the same clusters, float64 (classes, m).
        sizes: number of clusters of each class, int64 (classes,); the other counts are noise alone.
        noise: its standard deviation.

    Returns:
        Not negative, float64 (classes, m).
    """
    counts = torch.where(torch.arange(counts.shape[1]) < sizes.clamp_min(1)[:, None], counts, 0.0)
    total = counts.sum(1, keepdim=True).clamp_min(0)
    usual = total * drawn / drawn.sum(1, keepdim=True).clamp_min(LEAST)
    apart = counts - usual
    kept = 1 - sizes.clamp_min(1) * noise**2 / apart.square().sum(1).clamp_min(LEAST)
    return (usual + kept.clamp_min(0)[:, None] * apart).clamp_min(0)


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
        state = {"step": 1, **vars(cluster_candidates(probe, candidates, most, device))}
        if checkpoint is not None:
            checkpoint.save(state)
    state = access.ranks.broadcast_state(state)
    clusters = Clusters(state["centres"], state["sizes"], state["variances"])
    # candidates that are alike make narrow clusters, between which last bits of features can move a vote
    features = access.map(
        lambda images: probe.features(to_unit_range(images.numpy(), device)).cpu(),
        access.images,
        title="features",
        decides=True,
    )
    counts = access.mean(NAME, clusters.shares, features, access.labels) * access.facts.dataset_size
    return Votes(clusters, counts, noise)


def cluster_candidates(probe: Probe, candidates: Candidates, most: int, device: torch.device) -> Clusters:
    """Cluster the candidates of each class.

    Args:
        probe: whose features are clustered.
        candidates: of which those that are accepted are clustered.
        most: clusters of a class.
        device: where to compute.
    """
    classes = candidates.probabilities.shape[1]
    features = probe_features(probe.to(device), candidates.images[candidates.accepted], device).cpu().numpy()
    labels = candidates.wanted[candidates.accepted]
    found, variances = [], np.ones(classes)
    for number in range(classes):
        own = features[labels == number]
        found.append(cluster_centres(own, max(1, min(most, len(own) // CANDIDATES_OF_A_CLUSTER)), seed=number))
        if len(own):
            nearest = _squares(torch.from_numpy(own), torch.from_numpy(found[-1])).min(1).values.mean().item()
            variances[number] = max(nearest, LEAST_VARIANCE * float(np.square(own).sum(1).mean()))
    centres = torch.zeros(classes, max(1, *map(len, found)), features.shape[1])
    for number, rows in enumerate(found):
        centres[number, : len(rows)] = torch.from_numpy(rows)
    return Clusters(centres, torch.tensor([len(rows) for rows in found]), torch.from_numpy(variances))


def _squares(rows: Tensor, centres: Tensor) -> Tensor:
    """Squared distances of all rows (n, d) from all centres (k, d), float64 (n, k)."""
    rows, centres = rows.double(), centres.double()
    return rows.square().sum(1, keepdim=True) - 2 * rows @ centres.T + centres.square().sum(1)
