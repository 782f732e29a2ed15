"""A GAN with a private discriminator, from "Private GANs, Revisited" (Bie, Kamath, Zhang; TMLR); no public images.

settings.py       all settings
private_stage.py  the release and private training; fakes.py has the fakes and generator steps, controller.py their pace
audited.py        the network of an audit; attacked.py has scores for membership inference
generator.py      sampling
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid.errors import InputError
from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.methods.dp_gan.settings import DpGanSettings

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


class DpGan:
    """See `rapid.methods.base.Method`."""

    name = "dp-gan"
    settings = DpGanSettings
    has_public_stage = False
    base: BaseUse = "none"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: DpGanSettings) -> Description:
        """There is no public stage."""
        raise InputError("method", "has no public stage; start with train-private", self.name)

    def releases(
        self, settings: DpGanSettings, facts: PublicFacts, base: Bundle | None
    ) -> Sequence[DpSgdSpec | QuerySpec]:
        """The discriminator, and tones."""
        from rapid.methods.dp_gan.private_stage import releases

        return releases(settings, facts)

    def train_private(
        self, access: PrivateAccess, base: Bundle | None, settings: DpGanSettings
    ) -> Mapping[str, Component]:
        """Train discriminator and generator, and fit tones."""
        from rapid.methods.dp_gan.private_stage import train_private

        return train_private(access, settings)

    def describe_private(self, settings: DpGanSettings, base: Bundle | None, budget: Budget) -> Description:
        """Networks and frequency of generator steps."""
        from rapid.methods.dp_gan.private_stage import describe_private

        return describe_private(settings)

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """What of the training is released."""
        return ["The generator was trained on released weights of the discriminator alone, which is post-processing."]

    def trained_parameters(self, settings: DpGanSettings, classes: int) -> int:
        """Number of trained parameters of the discriminator."""
        from rapid.methods.dp_gan.private_stage import trained_parameters

        return trained_parameters(settings, classes)

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> Generator:
        """One network call."""
        from rapid.methods.dp_gan.generator import DpGanGenerator

        return DpGanGenerator(bundle, device, generation)

    def typical(self, settings: DpGanSettings) -> DpGanSettings:
        """With a fixed n_D, as adaptive steps have it for most of a run; see `rapid.methods.base.Paced`."""
        from rapid.methods.dp_gan.private_stage import typical

        return typical(settings)

    def other_work(self, settings: DpGanSettings) -> float:
        """None; see `rapid.methods.base.Paced`."""
        return 0.0

    def audited(self, bundle: Bundle) -> Sequence[Subject]:
        """The discriminator; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dp_gan.audited import subjects

        return subjects(bundle.settings_as(DpGanSettings))

    def membership_scores(
        self, bundle: Bundle, images: ImageSet, device: torch.device
    ) -> Mapping[str, NDArray[np.float64]]:
        """Distances to images of the generator; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dp_gan.attacked import membership_scores

        return membership_scores(bundle, images, device)


METHOD = DpGan()
