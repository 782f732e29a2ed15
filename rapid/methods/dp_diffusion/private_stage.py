"""DP diffusion's private stage: overlap check, and DP-SGD of the public denoiser or of a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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
from rapid.methods.dp_diffusion.generator import PixelSampler, check_guidance
from rapid.methods.dp_diffusion.networks import build_denoiser, with_private_classes
from rapid.methods.dp_diffusion.objective import PrivateObjective
from rapid.methods.dp_diffusion.public_stage import DENOISER, THUMBNAILS, bundle_facts
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser
from rapid.tones.fit import released_tones
from rapid.tones.release import tones_specs
from rapid.training import Trainer
from rapid.training.optimizers import build_optimizer, noisy_schedule, select_trainable, trained_count

TUNED = "diffusion model of pixels, fine-tuned (noise-prediction loss, all timesteps)"
NEW = "diffusion model of pixels, from random weights (noise-prediction loss, all timesteps)"
UNCONDITIONED = (
    "has no labels, and --base was trained with labels alone; give labels, or build it with "
    "--set denoiser.label_dropout=0.1 or --set denoiser.conditional=false"
)


def releases(settings: DpDiffusionSettings, facts: PublicFacts, base: Bundle | None) -> Sequence[DpSgdSpec | QuerySpec]:
    """Overlap check and tones, unless they have no share, and denoiser.

    Args:
        settings: share of epsilon, steps, batch, clip norm.
        facts: public facts of the private images.
        base: the public bundle; None from scratch, or before it exists: it is then assumed to fit.

    Raises:
        InputError: settings that do not fit the base or the images, or `private.trainable` matches no parameter.
    """
    own, size = settings.private, facts.dataset_size
    check_guidance(settings, "private", facts.classes, settings.generation.guidance)
    if base is not None:
        check_base(base, settings)
        only_labelled = settings.denoiser.pretrained and settings.denoiser.label_dropout == 0
        if not facts.classes and only_labelled and base.component(DENOISER, Denoiser).num_classes:
            raise InputError("private", UNCONDITIONED)
    elif not settings.base_wanted:
        trained_parameters(settings, len(facts.classes))
    specs: list[DpSgdSpec | QuerySpec] = []
    # without public images there is nothing to compare
    if own.overlap.share > 0 and (base is not None or settings.base_wanted):
        specs.append(overlap_spec(size, own.overlap.share, facts.unit))
    specs.append(training_spec(DENOISER, TUNED if settings.denoiser.pretrained else NEW, own, facts))
    return [*specs, *tones_specs(own.tones, size)]


def train_private(access: PrivateAccess, base: Bundle | None, settings: DpDiffusionSettings) -> Mapping[str, Component]:
    """Spend the budget, and return the components of the private bundle: the denoiser, and tones.

    Args:
        access: the private images.
        base: the public bundle; None from scratch.
        settings: of the run.

    Raises:
        PrivacyRefused: private images are among the public ones.
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    own, classes = settings.private, len(access.facts.classes)
    if OVERLAP in access.budget.names:
        assert base is not None
        check_overlap(access, base.component(THUMBNAILS, Thumbnails).rows)
    denoiser = _start(settings, classes, base).to(access.device)
    select_trainable(denoiser, own.trainable)
    # the images stay bytes; each step turns those that it draws into views
    labels = (
        access.map(lambda numbers: numbers.to(access.device), access.labels)
        if classes
        else access.map(lambda images: denoiser.null_labels(len(images)), access.images)
    )
    optimizer = build_optimizer(denoiser, own)
    schedule = noisy_schedule(optimizer, own.steps, own.learning_rate_schedule)
    access.train(
        DENOISER,
        Trainer(denoiser, optimizer, schedule, ema_decay=own.ema_decay),
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
    trained = ", ".join(f"`{pattern}`" for pattern in settings.private.trainable)
    before, facts = "began with random weights", bundle_facts(settings)
    if base is not None:
        facts |= {"public_classes": base.component(DENOISER, Denoiser).num_classes}
    if base is not None and settings.denoiser.pretrained:
        sources = ", ".join(base.config.public.sources) if base.config.public else ""
        before = f"was trained on public images ({sources})"
    about = f"A diffusion model of pixels {before}.\nThen it was trained privately (parameters: {trained}).\n"
    return Description(about, facts)


def privacy_notes(base: Bundle | None, budget: Budget) -> Sequence[str]:
    """The note on the overlap check, if there are public images."""
    return [] if base is None else [overlap_note(budget)]


def trained_parameters(settings: DpDiffusionSettings, classes: int) -> int:
    """Number of parameters of the denoiser that would be trained."""
    return trained_count(lambda: build_denoiser(settings, classes), settings.private.trainable)


def check_base(base: Bundle | None, settings: DpDiffusionSettings) -> None:
    """Check that the base, if there is one, fits the settings, before anything is spent.

    Raises:
        InputError: it does not.
    """
    if base is None:
        return
    select_trainable(base.component(DENOISER, Denoiser), settings.private.trainable)
    if settings.private.overlap.share > 0:
        base.component(THUMBNAILS, Thumbnails)


def _start(settings: DpDiffusionSettings, classes: int, base: Bundle | None) -> Denoiser:
    """The denoiser before its first private step: that of the base with new classes, or random weights."""
    if base is not None:
        return with_private_classes(base.component(DENOISER, Denoiser), classes)
    # always the same ones: they are public
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_denoiser(settings, classes)
