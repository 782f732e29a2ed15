"""DPDM (Dockhorn, Cao, Vahdat, Kreis 2022, arXiv 2210.09929): a diffusion model trained privately, from random weights.

settings.py       all settings
networks.py       the denoiser, and its training on public images
public_stage.py   an EDM of a few public images, which makes more of them; private training does not use it
tuned.py          configuration and sampler settings that the paper found best, by epsilon
objective.py      the loss
private_stage.py  release and private training
audited.py        networks of an audit, and scores for membership inference
generator.py      sampling
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.methods.dpdm.settings import DpdmGenerationSettings, DpdmSettings

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
    from rapid.sampling.generator import Generator


class Dpdm:
    """See `rapid.methods.base.Method`. Stages are imported when they run: the public one never loads the private."""

    name = "dpdm"
    settings = DpdmSettings
    has_public_stage = True
    base: BaseUse = "none"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: DpdmSettings) -> Description:
        """Train an EDM that makes more of a few public images."""
        from rapid.methods.dpdm.public_stage import train_public

        return train_public(builder, public, settings)

    def releases(
        self, settings: DpdmSettings, facts: PublicFacts, base: Bundle | None
    ) -> Sequence[DpSgdSpec | QuerySpec]:
        """The denoiser, and tones."""
        from rapid.methods.dpdm.private_stage import releases

        return releases(settings, facts)

    def train_private(
        self, access: PrivateAccess, base: Bundle | None, settings: DpdmSettings
    ) -> Mapping[str, Component]:
        """Train the denoiser, and fit tones."""
        from rapid.methods.dpdm.private_stage import train_private

        return train_private(access, settings)

    def describe_private(self, settings: DpdmSettings, base: Bundle | None, budget: Budget) -> Description:
        """Configuration and multiplicity."""
        from rapid.methods.dpdm.private_stage import describe_private

        return describe_private(settings, budget)

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """None."""
        return []

    def trained_parameters(self, settings: DpdmSettings, classes: int) -> int:
        """Of the denoiser."""
        from rapid.methods.dpdm.private_stage import trained_parameters

        return trained_parameters(settings, classes)

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> Generator:
        """From noise to images."""
        from rapid.methods.dpdm.generator import DpdmGenerator

        assert isinstance(generation, DpdmGenerationSettings)
        return DpdmGenerator(bundle, device, generation)

    def audited(self, bundle: Bundle) -> Sequence[Subject]:
        """The denoiser; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dpdm.audited import subjects

        return subjects(bundle)

    def membership_scores(
        self, bundle: Bundle, images: ImageSet, device: torch.device
    ) -> Mapping[str, NDArray[np.float64]]:
        """Losses of the denoiser; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dpdm.audited import membership_scores

        return membership_scores(bundle, images, device)


METHOD = Dpdm()
