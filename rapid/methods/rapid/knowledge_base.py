"""The knowledge base of a bundle: one trajectory for each image of D_ref, its key at k and its value at v."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBase, KnowledgeBaseError, KnowledgeBaseWriter
from torch import Tensor

from rapid.bundle import Bundle
from rapid.config.sections import AugmentSettings, ScheduleSettings
from rapid.data.augmented import AugmentedImages
from rapid.diffusion import Schedule
from rapid.errors import InputError, RapidError
from rapid.methods.rapid.networks import one_step_query
from rapid.methods.rapid.settings import KnowledgeBaseSettings, RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.precision import exact_float32
from rapid.progress import Progress
from rapid.ranks import Ranks
from rapid.training.recipe import Recipe

NAME = "knowledge_base"
KIND = (KnowledgeBase.__module__, KnowledgeBase.__qualname__)
Models = tuple[Autoencoder, Denoiser, TrajectoryEncoder]
"""The frozen public networks, in evaluation mode on one device."""
Records = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]
"""Keys (n, d), values (n, c, h, w) and labels (n,)."""


class Retrieval(NamedTuple):
    """What finds and holds records. A bundle has both or neither."""

    encoder: TrajectoryEncoder
    """Makes queries."""
    knowledge_base: KnowledgeBase
    """Answers them."""


class KnowledgeBaseRecipe(Recipe):
    """All inputs of the knowledge base, besides the three networks."""

    views: int
    augment: AugmentSettings
    schedule: ScheduleSettings
    knowledge_base: KnowledgeBaseSettings
    latent_shape: tuple[int, int, int]
    k: int
    v: int


@torch.no_grad()
@exact_float32()
def build_knowledge_base(
    path: Path,
    recipe: KnowledgeBaseRecipe,
    views: AugmentedImages,
    labels: NDArray[np.int64],
    models: Models,
    hashes: dict[str, str],
    device: torch.device,
    ranks: Ranks | None = None,
) -> None:
    """Write the knowledge base of D_ref to the new folder `path`, in bounded memory.

    The ranks compute records in turn, and the first one writes them: the same ones in the same order as a single rank.

    For each augmented image, one noise draw eps gives the whole trajectory x_t = sqrt(abar_t) x + sqrt(1 - abar_t) eps:
    the key is h of the one-step-denoised x_k, the value is x_v of the SAME eps.

    Args:
        path: the folder; appears when it is complete.
        recipe: k, v, the schedule and the index.
        views: augmented images of D_ref.
        labels: of the images of D_ref, int64 (N,), kept beside the records.
        models: autoencoder, denoiser and encoder.
        hashes: content hashes of the three, recorded in the manifest.
        device: where to compute.
        ranks: the processes that share the work.

    Raises:
        LostRank: another rank is gone; nothing is written.
        Stopped: a stop was requested; nothing is written.
    """
    autoencoder, denoiser, encoder = models
    ranks, schedule = ranks or Ranks(), Schedule.build(recipe.schedule).to(device)
    size = recipe.knowledge_base.batch_size

    def batches() -> Iterator[tuple[int, Tensor]]:
        generator = torch.Generator().manual_seed(3)
        for start in range(0, len(views), size):
            yield start, torch.randn(min(size, len(views) - start), *recipe.latent_shape, generator=generator)

    def records(batch: tuple[int, Tensor]) -> Records:
        start, eps = batch[0], batch[1].to(device)
        latents = autoencoder.encode(views.batch(start, size))
        keys = encoder(one_step_query(denoiser, schedule, latents, eps, recipe.k))
        values = schedule.diffuse(latents, eps, torch.full((len(latents),), recipe.v, device=device))
        return keys.cpu().numpy(), values.cpu().numpy(), labels[views.rows[start : start + size]]

    writer = KnowledgeBaseWriter(
        path,
        key_dim=encoder.config["features"],
        value_shape=recipe.latent_shape,
        k=recipe.k,
        v=recipe.v,
        timesteps=schedule.timesteps,
        networks=hashes,
        index_type=recipe.knowledge_base.index_type,
    )
    try:
        with writer if ranks.first else nullcontext(), Progress("knowledge base", len(views), "record") as progress:
            for keys, values, numbers in ranks.in_turn(batches(), records):
                if ranks.first:
                    writer.append(keys, values, numbers)
                progress.advance(len(keys))
    except KnowledgeBaseError as error:
        raise RapidError(f"the knowledge base cannot be written: {error}") from None


def public_denoiser_name(bundle: Bundle) -> str:
    """Name of the denoiser component that makes queries and with which the knowledge base was built."""
    return "public_denoiser" if bundle.config.kind == "private" else "denoiser"


def open_knowledge_base(bundle: Bundle) -> KnowledgeBase:
    """The knowledge base of a RAPID bundle; `Bundle.verify` checks the content of its values.

    Raises:
        InputError: missing, damaged, or made by other networks.
    """
    folders = {"autoencoder": "autoencoder", "denoiser": public_denoiser_name(bundle), "encoder": "encoder"}
    hashes = {role: bundle.config.components[folder] for role, folder in folders.items()}
    try:
        return KnowledgeBase.open(bundle.path / NAME, hashes, verify=False)
    except KnowledgeBaseError as error:
        raise InputError("", f"{bundle.path / NAME}: {error}") from None


def open_retrieval(bundle: Bundle) -> Retrieval | None:
    """Encoder and knowledge base of a RAPID bundle; None where `retrieval.enabled` is false.

    Raises:
        InputError: missing, damaged, or made by other networks.
    """
    if not bundle.settings_as(RapidSettings).retrieval.enabled:
        return None
    return Retrieval(bundle.component("encoder", TrajectoryEncoder), open_knowledge_base(bundle))
