"""Building the knowledge base: one trajectory an image of D_ref, its key at k and its value at v."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBaseWriter

from rapid.config.sections import Settings
from rapid.data.augmented import AugmentedImages
from rapid.diffusion import Schedule
from rapid.methods.rapid.networks import one_step_query
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.progress import Progress


@torch.no_grad()
def build_knowledge_base(
    path: Path,
    settings: Settings,
    views: AugmentedImages,
    labels: NDArray[np.int64],
    models: tuple[Autoencoder, Denoiser, TrajectoryEncoder],
    networks: dict[str, str],
    device: torch.device,
) -> None:
    """Write the knowledge base of D_ref to the new folder `path`, in bounded memory.

    For each view one noise draw eps gives the whole trajectory x_t = sqrt(abar_t) x + sqrt(1 - abar_t) eps: the key is
    h of the one-step-denoised x_k, the value is x_v of the SAME eps.

    Args:
        path: the folder; appears when all is written.
        settings: k, v and the schedule.
        views: of D_ref.
        labels: of the images of D_ref, int64 (N,), kept beside the entries.
        models: autoencoder, denoiser and encoder, in evaluation mode on `device`.
        networks: content hashes of the three, recorded in the manifest.
        device: where to compute.
    """
    autoencoder, denoiser, encoder = models
    schedule = Schedule.build(settings.schedule).to(device)
    k, v = settings.retrieval.k, settings.retrieval.v
    size = settings.knowledge_base.batch_size
    generator = torch.Generator().manual_seed(3)
    writer = KnowledgeBaseWriter(
        path,
        key_dim=settings.encoder.features,
        value_shape=settings.latent_shape,
        k=k,
        v=v,
        timesteps=schedule.timesteps,
        networks=networks,
        index_type=settings.knowledge_base.index_type,
    )
    with writer, Progress("knowledge base", len(views), "entry") as progress:
        for start, batch in zip(count(0, size), views.batches(size), strict=False):
            latents = autoencoder.encode(batch)
            eps = torch.randn(latents.shape, generator=generator).to(device)
            keys = encoder(one_step_query(denoiser, schedule, latents, eps, k))
            values = schedule.diffuse(latents, eps, torch.full((len(latents),), v, device=device))
            writer.append(keys.cpu().numpy(), values.cpu().numpy(), labels[views.rows[start : start + size]])
            progress.advance(len(latents))
