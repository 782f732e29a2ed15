"""DP diffusion's private stage: overlap check, and DP-SGD of the public denoiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim.lr_scheduler import LambdaLR

from rapid.bundle import Bundle, Component, Thumbnails
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.execution import Execution
from rapid.dp.overlap import NAME as OVERLAP
from rapid.dp.overlap import check_overlap, overlap_note, overlap_spec
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.training_spec import training_spec
from rapid.errors import InputError
from rapid.methods.base import Description
from rapid.methods.dp_diffusion.generator import PixelSampler
from rapid.methods.dp_diffusion.networks import build_denoiser, with_private_classes
from rapid.methods.dp_diffusion.objective import PrivateObjective
from rapid.methods.dp_diffusion.public_stage import DENOISER, THUMBNAILS, public_facts
from rapid.methods.dp_diffusion.settings import DpDiffusionPrivateSettings, DpDiffusionSettings
from rapid.nn import Denoiser
from rapid.tones.fit import released_tones
from rapid.tones.release import tones_specs
from rapid.training import Trainer
from rapid.training.optimizers import build_optimizer, noisy_schedule, select_trainable, trained_count

TITLE = "diffusion model of pixels, fine-tuned (noise-prediction loss, all timesteps)"
UNCONDITIONED = (
    "has no labels, and --base was trained with labels alone; give labels, or build it with "
    "--set denoiser.label_dropout=0.1 or --set denoiser.conditional=false"
)


def releases(settings: DpDiffusionSettings, facts: PublicFacts, base: Bundle | None) -> Sequence[DpSgdSpec | QuerySpec]:
    """Overlap check and tones, unless they have no share, and denoiser.

    Args:
        settings: share of epsilon, steps, batch, clip norm.
        facts: public facts of the private images.
        base: the public bundle; None before it exists: it is then assumed to fit.

    Raises:
        InputError: settings that do not fit the base or the images.
    """
    own, size = settings.private, facts.dataset_size
    if base is not None:
        _check_base(base, settings, facts)
    specs: list[DpSgdSpec | QuerySpec] = []
    if own.overlap.share > 0:
        specs.append(overlap_spec(size, own.overlap.share, facts.unit))
    specs.append(training_spec(DENOISER, TITLE, own, facts))
    return [*specs, *tones_specs(own.tones, size)]


def train_private(access: PrivateAccess, base: Bundle | None, settings: DpDiffusionSettings) -> Mapping[str, Component]:
    """Spend the budget, and return the components of the private bundle: the denoiser, and tones.

    Args:
        access: the private images.
        base: the public bundle.
        settings: of the run.

    Raises:
        PrivacyRefused: private images are among the public ones.
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    assert base is not None
    own, classes = settings.private, len(access.facts.classes)
    if OVERLAP in access.budget.names:
        check_overlap(access, base.component(THUMBNAILS, Thumbnails).rows)
    denoiser = with_private_classes(base.component(DENOISER, Denoiser), classes).to(access.device)
    select_trainable(denoiser, own.trainable)
    # the images stay bytes; each step turns those that it draws into views
    labels = (
        access.map(lambda numbers: numbers.to(access.device), access.labels)
        if classes
        else access.map(lambda images: denoiser.null_labels(len(images)), access.images)
    )
    optimizer = build_optimizer(denoiser, own)
    access.train(
        DENOISER,
        Trainer(denoiser, optimizer, learning_rates(optimizer, own), ema_decay=own.ema_decay),
        PrivateObjective(settings, denoiser, access.draws),
        [access.images, labels],
        execution=Execution.of(own),
    )
    return {DENOISER: denoiser} | released_tones(
        access,
        lambda: PixelSampler(denoiser, settings, "private", access.facts.classes, access.device, settings.generation),
    )


def describe_private(settings: DpDiffusionSettings, base: Bundle | None, budget: Budget) -> Description:
    """Describe a private bundle."""
    assert base is not None
    public = base.component(DENOISER, Denoiser)
    sources = ", ".join(base.config.public.sources) if base.config.public else ""
    trained = ", ".join(f"`{pattern}`" for pattern in settings.private.trainable)
    before = (
        f"was trained on public images ({sources})" if settings.denoiser.pretrained else "began with random weights"
    )
    about = f"A diffusion model of pixels {before}.\nThen it was trained privately (parameters: {trained}).\n"
    return Description(about, public_facts(settings) | {"public_classes": public.num_classes})


def privacy_notes(budget: Budget) -> Sequence[str]:
    """The note on the overlap check."""
    return [overlap_note(budget)]


def trained_parameters(settings: DpDiffusionSettings, classes: int) -> int:
    """Number of parameters of the denoiser that would be trained."""
    return trained_count(lambda: build_denoiser(settings, classes), settings.private.trainable)


def learning_rates(optimizer: torch.optim.Optimizer, settings: DpDiffusionPrivateSettings) -> LambdaLR:
    """The learning rate by step, as a share of the highest."""
    if settings.learning_rate_schedule == "cosine":
        return noisy_schedule(optimizer, settings.steps)
    return LambdaLR(optimizer, lambda _: 1.0)


def _check_base(base: Bundle, settings: DpDiffusionSettings, facts: PublicFacts) -> None:
    """Check that the base fits the settings and the images, before anything is spent."""
    public = base.component(DENOISER, Denoiser)
    select_trainable(public, settings.private.trainable)
    if settings.private.overlap.share > 0:
        base.component(THUMBNAILS, Thumbnails)
    only_labelled = settings.denoiser.pretrained and settings.denoiser.label_dropout == 0
    if public.num_classes and only_labelled and not facts.classes:
        raise InputError("private", UNCONDITIONED)
