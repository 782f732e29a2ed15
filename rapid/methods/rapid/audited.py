"""What an audit trains: RAPID's denoiser with the losses of its private stage, and the probe's linear layer.

No private images are used. Canaries are random latents, or features, with random labels. Without a public bundle the
public networks have random weights and the knowledge base has random entries, in the shapes that the settings give.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rapid_index import KnowledgeBase, KnowledgeBaseWriter
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.bundle import Bundle
from rapid.diffusion import Schedule
from rapid.dp.audit import Subject
from rapid.dp.randomness import Randomness
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.networks import build_denoiser
from rapid.methods.rapid.objectives import Draws, PrivateObjective, Retriever, uses_retrieval
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser, TrajectoryEncoder
from rapid.probe.network import CONSTANT
from rapid.training.optimizers import select_trainable

CLASSES, ENTRIES, CANARIES = 10, 64, 16


def subjects(settings: RapidSettings, base: Bundle | None = None) -> Sequence[Subject]:
    """The late steps in float32 and in bfloat16, and the probe's linear layer.

    Args:
        settings: networks, objective, clip norms.
        base: public bundle whose networks and knowledge base are used.
    """
    late = late_steps(settings, base)
    return [late, late.with_autocast(), probe_head(settings)]


def late_steps(settings: RapidSettings, base: Bundle | None = None) -> Subject:
    """The denoiser and the objective of the private stage, each canary with its own draws, label and latent.

    Args:
        settings: see `subjects`.
        base: see `subjects`.

    Raises:
        InputError: `private.trainable` matches no parameter.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        public = build_denoiser(settings, CLASSES) if base is None else base.component("denoiser", Denoiser)
        denoiser = public.with_classes(CLASSES).eval()
        retriever = _retriever(settings, public, base) if uses_retrieval(settings) else None
    select_trainable(denoiser, settings.private.trainable)
    objective = PrivateObjective(settings, denoiser, retriever, Randomness())
    draws = objective.draw(CANARIES)
    latents = torch.randn(CANARIES, *settings.latent_shape, generator=generator)
    labels = torch.arange(CANARIES) % CLASSES

    def losses(indices: Tensor) -> Tensor:
        own = Draws(*(part[indices] for part in draws))
        return objective.losses(latents[indices], labels[indices], own)

    return Subject(
        f"late steps ({settings.private.objective})",
        denoiser,
        losses,
        CANARIES,
        settings.private.clip_norm,
        settings.private.multiplicity,
        physical_batch=settings.private.draws_at_a_time,
    )


def probe_head(settings: RapidSettings) -> Subject:
    """The probe's linear layer on unit features, as `rapid.probe.head` trains it."""
    generator = torch.Generator().manual_seed(1)
    width = settings.probe.features * settings.probe.stages
    features = F.normalize(torch.randn(CANARIES, width, generator=generator), dim=1)
    features = F.pad(features, (0, 1), value=CONSTANT)
    labels = torch.arange(CANARIES) % CLASSES
    head = nn.Linear(features.shape[1], CLASSES, bias=False)
    nn.init.zeros_(head.weight)

    def losses(indices: Tensor) -> Tensor:
        return F.cross_entropy(head(features[indices]), labels[indices], reduction="none")

    return Subject("probe", head, losses, CANARIES, settings.private.probe.clip_norm)


def _retriever(settings: RapidSettings, public: Denoiser, base: Bundle | None) -> Retriever:
    encoder = TrajectoryEncoder.build(settings) if base is None else base.component("encoder", TrajectoryEncoder)
    return Retriever(
        schedule=Schedule.build(settings.schedule),
        denoiser=public.eval().requires_grad_(False),
        encoder=encoder.eval().requires_grad_(False),
        knowledge_base=_random_entries(settings) if base is None else open_knowledge_base(base),
        k=settings.retrieval.k,
        neighbours=settings.private.neighbours,
    )


def _random_entries(settings: RapidSettings) -> KnowledgeBase:
    """Random unit keys and values of unit variance, about that of latents diffused to step v."""
    entries = max(ENTRIES, settings.private.neighbours)
    keys = F.normalize(torch.randn(entries, settings.encoder.features), dim=1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "entries"
        with KnowledgeBaseWriter(
            path,
            key_dim=settings.encoder.features,
            value_shape=settings.latent_shape,
            k=settings.retrieval.k,
            v=settings.retrieval.v,
            timesteps=settings.schedule.timesteps,
            networks={"encoder": "0" * 64},
        ) as writer:
            values = torch.randn(entries, *settings.latent_shape)
            writer.append(keys.numpy(), values.numpy(), (torch.arange(entries) % CLASSES).numpy())
        # the values stay mapped when the folder is gone
        return KnowledgeBase.open(path)
