"""RAPID (ICLR 2025): late denoising steps trained privately from retrieved public intermediates.

settings.py       all settings; generation_settings.py and distillation_settings.py have sections of them
automatic.py      chooses them, with automatic_networks.py and automatic_private.py; pace.py says what takes how long
public_stage.py   the public bundle; networks.py, knowledge_base.py and subspace.py make its parts, retrieval.py and
                  diagnosis.py measure them
private_stage.py  releases and private training; objectives.py has the losses `rapid`, `late` and `ldm`; ball.py,
                  moments.py, class_moments.py, transport.py, warmup.py, candidates.py, votes.py and
                  distillation.py what comes before and after
audited.py        networks and canaries of an audit; attacked.py has scores for membership inference
generator.py      sampling, with what parts.py holds; neighbours.py and search.py choose records of the knowledge
                  base; guidance.py pulls images towards their class, as far as levels.py finds necessary
classifier.py     the probe by itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid.methods.base import BaseUse, Choice, Description, PublicImages, Resources, Tree
from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.methods.rapid.settings import RapidSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from rapid.bundle import Bundle, Component
    from rapid.bundle.builder import BundleBuilder
    from rapid.config.sections import SamplingSettings
    from rapid.data import ImageSet
    from rapid.dp.access import PrivateAccess, PublicFacts
    from rapid.dp.audit import Subject
    from rapid.dp.budget import Budget
    from rapid.dp.releases import DpSgdSpec, QuerySpec
    from rapid.sampling.classifier import Classifier
    from rapid.sampling.generator import Generator

TRAINING_EPSILON_SCALE, TRAINING_EPSILON_SCALE_GUIDED = 1.2, 1.35
"""Of images that are only to train classifiers on: with it, networks learnt most of letters. The second where guidance
was trained in, which makes the images of a class more alike."""


class Rapid:
    """See `rapid.methods.base.Method`. Stages are imported when they run: the public one never loads the private."""

    name = "rapid"
    settings = RapidSettings
    has_public_stage = True
    base: BaseUse = "required"

    def fixed_by_networks(self, settings: RapidSettings) -> tuple[str, ...]:
        """The networks' own sections, what images they take, and k; without an encoder, that retrieval is off."""
        images = ("image.size", "image.channels")
        fixed = (*images, "schedule", "autoencoder", "denoiser", "encoder", "probe", "retrieval.k")
        return fixed if settings.retrieval.enabled else (*fixed, "retrieval.enabled")

    def choose_public(self, sets: Sequence[ImageSet], resources: Resources, image: Tree) -> Choice:
        """By the sizes, colours and symmetries of the public images, and measured times."""
        from rapid.methods.rapid.automatic import choose_public

        return choose_public(sets, resources, image)

    def seconds_per_gradient(self, settings: RapidSettings, device: torch.device, least: float) -> float:
        """Of the denoiser."""
        from rapid.methods.rapid.automatic_private import seconds_per_gradient

        return seconds_per_gradient(settings, device, least)

    def choose_private(
        self, settings: RapidSettings, facts: PublicFacts, epsilon: float, gradients: float, processes: int
    ) -> Choice:
        """By N and epsilon."""
        from rapid.methods.rapid.automatic_private import choose_private

        return choose_private(settings, facts, epsilon, gradients, processes)

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: RapidSettings) -> Description:
        """Make autoencoder, denoiser and probe features; with retrieval, encoder and knowledge base."""
        from rapid.methods.rapid.public_stage import train_public

        return train_public(builder, public, settings)

    def releases(
        self, settings: RapidSettings, facts: PublicFacts, base: Bundle | None
    ) -> Sequence[DpSgdSpec | QuerySpec]:
        """Overlap check, probe, moments, denoiser, votes and tones, as far as they are used."""
        from rapid.methods.rapid.private_stage import releases

        return releases(settings, facts, base)

    def check_base(self, base: Bundle | None, settings: RapidSettings) -> None:
        """Components that the settings need; see `rapid.methods.base.Checking`."""
        from rapid.methods.rapid.private_stage import check_base

        check_base(base, settings)

    def train_private(
        self, access: PrivateAccess, base: Bundle | None, settings: RapidSettings
    ) -> Mapping[str, Component]:
        """Train probe and denoiser, and release moments, votes and tones, as far as they are used."""
        from rapid.methods.rapid.private_stage import train_private

        return train_private(access, base, settings)

    def describe_private(self, settings: RapidSettings, base: Bundle | None, budget: Budget) -> Description:
        """Objective, k, v and knowledge base."""
        from rapid.methods.rapid.private_stage import describe_private

        return describe_private(settings, base, budget)

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """The note on the overlap check."""
        from rapid.methods.rapid.private_stage import privacy_notes

        return privacy_notes(budget)

    def trained_parameters(self, settings: RapidSettings, classes: int) -> int:
        """Number of trained parameters of the denoiser."""
        from rapid.methods.rapid.private_stage import trained_parameters

        return trained_parameters(settings, classes)

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> Generator:
        """Early steps, retrieval, late steps."""
        from rapid.methods.rapid.generator import RapidGenerator

        assert isinstance(generation, GenerationSettings)
        return RapidGenerator(bundle, device, generation)

    def probe(self, bundle: Bundle, device: torch.device) -> Classifier | None:
        """The probe of a private bundle that was trained on labelled images."""
        from rapid.methods.rapid.classifier import ProbeClassifier

        return ProbeClassifier(bundle, device) if self._has_probe(bundle) else None

    def for_training(self, bundle: Bundle) -> Sequence[str] | None:
        """None refused, and at least as varied as the bundle's own; see `rapid.methods.base.Teaching`."""
        if not self._has_probe(bundle):
            return None
        settings = bundle.settings_as(RapidSettings)
        distillation = settings.private.distillation
        guided = "after" in distillation.times and distillation.guidance > 1
        scale = max(
            TRAINING_EPSILON_SCALE_GUIDED if guided else TRAINING_EPSILON_SCALE, settings.generation.epsilon_scale
        )
        return ("generation.attempts=1", f"generation.epsilon_scale={scale}")

    def _has_probe(self, bundle: Bundle) -> bool:
        from rapid.probe.network import COMPONENT

        return bundle.config.kind == "private" and bundle.has(COMPONENT)

    def typical(self, settings: RapidSettings) -> RapidSettings:
        """Without warm-up and distillation; see `rapid.methods.base.Paced`."""
        from rapid.methods.rapid.pace import typical

        return typical(settings)

    def other_work(self, settings: RapidSettings) -> float:
        """Warm-up, candidates and distillation; see `rapid.methods.base.Paced`."""
        from rapid.methods.rapid.pace import other_work

        return other_work(settings)

    def audited(self, bundle: Bundle) -> Sequence[Subject]:
        """Late steps and probe; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.rapid.audited import subjects

        return subjects(bundle.settings_as(RapidSettings), bundle)

    def membership_scores(
        self, bundle: Bundle, images: ImageSet, device: torch.device
    ) -> Mapping[str, NDArray[np.float64]]:
        """Losses of the denoiser; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.rapid.attacked import membership_scores

        return membership_scores(bundle, images, device)


METHOD = Rapid()
