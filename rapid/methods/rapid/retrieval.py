"""How often retrieval finds the class of its query: on public images that the knowledge base does not hold."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBase

from rapid.bundle.format import RetrievalAccuracy
from rapid.config.sections import Settings
from rapid.data import to_unit_range
from rapid.diffusion import Schedule
from rapid.methods.rapid.networks import one_step_query
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.progress import Progress

QUERIES, BATCH = 2000, 500
TOP = 5


@torch.no_grad()
def measure_retrieval(
    settings: Settings,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    models: tuple[Autoencoder, Denoiser, TrajectoryEncoder],
    knowledge_base: KnowledgeBase,
    device: torch.device,
) -> RetrievalAccuracy:
    """Queries from images of D_pre, each diffused to k with its own noise, as in private training.

    Args:
        settings: k and the schedule.
        images: D_pre, uint8 (N, H, W) or (N, H, W, 3), N >= 1.
        labels: int64 (N,).
        models: autoencoder, denoiser and encoder, in evaluation mode on `device`.
        knowledge_base: of D_ref.
        device: where to compute.
    """
    autoencoder, denoiser, encoder = models
    schedule = Schedule.build(settings.schedule).to(device)
    generator = torch.Generator().manual_seed(6)
    chosen = torch.randperm(len(images), generator=generator)[:QUERIES].numpy()
    top = min(TOP, len(knowledge_base))
    found = []
    with Progress("retrieval accuracy", len(chosen), "query") as progress:
        for rows in np.split(chosen, range(BATCH, len(chosen), BATCH)):
            latents = autoencoder.encode(to_unit_range(images[rows], device))
            eps = torch.randn(latents.shape, generator=generator).to(device)
            queries = encoder(one_step_query(denoiser, schedule, latents, eps, settings.retrieval.k))
            entries = knowledge_base.search(queries.float().cpu().numpy(), top).indices
            found.append(knowledge_base.labels[entries] == labels[rows, None])
            progress.advance(len(rows))
    hits = np.concatenate(found)
    shares = np.bincount(knowledge_base.labels, minlength=int(labels.max()) + 1) / len(knowledge_base)
    return RetrievalAccuracy(
        queries=len(chosen),
        top1=float(hits[:, 0].mean()),
        top5=float(hits.any(1).mean()),
        chance=float(shares[labels[chosen]].mean()),
    )
