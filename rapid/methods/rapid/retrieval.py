"""How often retrieval finds the class of its query, on public images outside the knowledge base."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBase

from rapid.data import to_unit_range
from rapid.data.subset import Images
from rapid.diffusion import Schedule
from rapid.methods.rapid.knowledge_base import Models
from rapid.methods.rapid.networks import one_step_query
from rapid.progress import Progress
from rapid.stopping import check_stop

QUERIES, BATCH = 2000, 500
TOP = 5


class RetrievalAccuracy(NamedTuple):
    """How often the neighbours of public queries have the class of the query."""

    queries: int
    """Number of images of D_pre, none of which is in the knowledge base."""
    top1: float
    """Share whose nearest neighbour has their class."""
    top5: float
    """Share with their class among the five nearest."""
    chance: float
    """Expected top1 if a record were drawn at random."""


@torch.no_grad()
def measure_retrieval(
    schedule: Schedule,
    k: int,
    images: Images,
    labels: NDArray[np.int64],
    models: Models,
    knowledge_base: KnowledgeBase,
    device: torch.device,
) -> RetrievalAccuracy:
    """Measure retrieval with images of D_pre as queries, each diffused to k with its own noise, as in private training.

    Args:
        schedule: on `device`.
        k: timestep of the queries.
        images: D_pre, uint8 (N, H, W) or (N, H, W, 3), N >= 1.
        labels: int64 (N,).
        models: autoencoder, denoiser and encoder.
        knowledge_base: of D_ref.
        device: where to compute.

    Raises:
        Stopped: a stop was requested.
    """
    autoencoder, denoiser, encoder = models
    generator = torch.Generator().manual_seed(6)
    chosen = torch.randperm(len(images), generator=generator)[:QUERIES].numpy()
    top = min(TOP, len(knowledge_base))
    found = []
    with Progress("retrieval accuracy", len(chosen), "query") as progress:
        for rows in np.split(chosen, range(BATCH, len(chosen), BATCH)):
            check_stop()
            latents = autoencoder.encode(to_unit_range(images[rows], device))
            eps = torch.randn(latents.shape, generator=generator).to(device)
            queries = encoder(one_step_query(denoiser, schedule, latents, eps, k))
            neighbours = knowledge_base.search(queries.float().cpu().numpy(), top).indices
            found.append(knowledge_base.labels[neighbours] == labels[rows, None])
            progress.advance(len(rows))
    hits = np.concatenate(found)
    shares = np.bincount(knowledge_base.labels, minlength=int(labels.max()) + 1) / len(knowledge_base)
    return RetrievalAccuracy(
        queries=len(chosen),
        top1=float(hits[:, 0].mean()),
        top5=float(hits.any(1).mean()),
        chance=float(shares[labels[chosen]].mean()),
    )
