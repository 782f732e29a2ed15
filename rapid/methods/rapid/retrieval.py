"""What retrieval finds for public images outside the knowledge base: the class of the query, the nearest records."""

from __future__ import annotations

from collections.abc import Iterator
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
from rapid.precision import exact_float32
from rapid.progress import Progress
from rapid.stopping import check_stop

QUERIES, BATCH = 2000, 500
TOP = 5
RECALL_QUERIES, RECALL_NEIGHBOURS = 200, 10


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
    top = min(TOP, len(knowledge_base))
    found: list[NDArray[np.bool_]] = []
    asked: list[NDArray[np.int64]] = []
    with Progress("retrieval accuracy", min(QUERIES, len(images)), "query") as progress:
        for rows, queries in _queries(schedule, k, images, QUERIES, models, device):
            neighbours = knowledge_base.search(queries, top).indices
            found.append(knowledge_base.labels[neighbours] == labels[rows, None])
            asked.append(labels[rows])
            progress.advance(len(rows))
    hits, own = np.concatenate(found), np.concatenate(asked)
    shares = np.bincount(knowledge_base.labels, minlength=int(labels.max()) + 1) / len(knowledge_base)
    return RetrievalAccuracy(
        queries=len(own),
        top1=float(hits[:, 0].mean()),
        top5=float(hits.any(1).mean()),
        chance=float(shares[own].mean()),
    )


class Recall(NamedTuple):
    """How many of the nearest records an approximate index finds."""

    queries: int
    """Number of images of D_pre, none of which is in the knowledge base."""
    neighbours: int
    """How many records were wanted of each."""
    share: float
    """Of the records that a comparison with every key finds."""


@torch.no_grad()
def measure_recall(
    schedule: Schedule, k: int, images: Images, models: Models, knowledge_base: KnowledgeBase, device: torch.device
) -> Recall:
    """Compare the index of the knowledge base with a search of every key; see `measure_retrieval` for the arguments.

    Raises:
        Stopped: a stop was requested.
    """
    parts = [queries for _, queries in _queries(schedule, k, images, RECALL_QUERIES, models, device)]
    queries, wanted = np.concatenate(parts), min(RECALL_NEIGHBOURS, len(knowledge_base))
    return Recall(len(queries), wanted, knowledge_base.recall(queries, wanted))


def _queries(
    schedule: Schedule, k: int, images: Images, count: int, models: Models, device: torch.device
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Rows of up to `count` images, int64 (n,), and the queries that they make, float32 (n, d), batch by batch."""
    autoencoder, denoiser, encoder = models
    generator = torch.Generator().manual_seed(6)
    chosen = torch.randperm(len(images), generator=generator)[:count].numpy()
    for rows in np.split(chosen, range(BATCH, len(chosen), BATCH)):
        check_stop()
        # as they are made to build and to search the knowledge base
        with exact_float32():
            latents = autoencoder.encode(to_unit_range(images[rows], device))
            eps = torch.randn(latents.shape, generator=generator).to(device)
            queries = encoder(one_step_query(denoiser, schedule, latents, eps, k)).float().cpu().numpy()
        yield rows, queries
