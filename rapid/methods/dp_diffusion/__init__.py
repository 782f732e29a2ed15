"""DP diffusion: a public diffusion model of pixels, fine-tuned privately; or a new one, trained from scratch.

Ghalebikesabi et al. (2023), "Differentially Private Diffusion Models Generate Useful Synthetic Images".

settings.py       all settings
public_stage.py   the public bundle; networks.py trains its denoiser and gives it new classes
private_stage.py  releases and private training; objective.py has the losses
audited.py        network and canaries of an audit; attacked.py has scores for membership inference
generator.py      sampling
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings, PixelSamplingSettings

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


class DpDiffusion:
    """See `rapid.methods.base.Method`. Stages are imported when they run: the public one never loads the private."""

    name = "dp-diffusion"
    settings = DpDiffusionSettings
    has_public_stage = True
    base: BaseUse = "optional"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: DpDiffusionSettings) -> Description:
        """Train the denoiser on public images."""
        from rapid.methods.dp_diffusion.public_stage import train_public

        return train_public(builder, public, settings)

    def releases(
        self, settings: DpDiffusionSettings, facts: PublicFacts, base: Bundle | None
    ) -> Sequence[DpSgdSpec | QuerySpec]:
        """Overlap check, denoiser and tones."""
        from rapid.methods.dp_diffusion.private_stage import releases

        return releases(settings, facts, base)

    def check_base(self, base: Bundle | None, settings: DpDiffusionSettings) -> None:
        """Parameters and components that the settings need; see `rapid.methods.base.Checking`."""
        from rapid.methods.dp_diffusion.private_stage import check_base

        check_base(base, settings)

    def train_private(
        self, access: PrivateAccess, base: Bundle | None, settings: DpDiffusionSettings
    ) -> Mapping[str, Component]:
        """Train the denoiser, that of the base or a new one, and fit tones."""
        from rapid.methods.dp_diffusion.private_stage import train_private

        return train_private(access, base, settings)

    def describe_private(self, settings: DpDiffusionSettings, base: Bundle | None, budget: Budget) -> Description:
        """What was trained on what."""
        from rapid.methods.dp_diffusion.private_stage import describe_private

        return describe_private(settings, base, budget)

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """The note on the overlap check, if there are public images."""
        from rapid.methods.dp_diffusion.private_stage import privacy_notes

        return privacy_notes(base, budget)

    def trained_parameters(self, settings: DpDiffusionSettings, classes: int) -> int:
        """Number of trained parameters of the denoiser."""
        from rapid.methods.dp_diffusion.private_stage import trained_parameters

        return trained_parameters(settings, classes)

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> Generator:
        """From noise to pixels."""
        from rapid.methods.dp_diffusion.generator import PixelGenerator

        assert isinstance(generation, PixelSamplingSettings)
        return PixelGenerator(bundle, device, generation)

    def audited(self, bundle: Bundle) -> Sequence[Subject]:
        """The denoiser; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dp_diffusion.audited import subjects

        return subjects(bundle.settings_as(DpDiffusionSettings))

    def membership_scores(
        self, bundle: Bundle, images: ImageSet, device: torch.device
    ) -> Mapping[str, NDArray[np.float64]]:
        """Loss of the denoiser; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dp_diffusion.attacked import membership_scores

        return membership_scores(bundle, images, device)


METHOD = DpDiffusion()
