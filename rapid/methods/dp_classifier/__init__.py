"""An image classifier: warm-up on public images like the private ones, then DP-SGD (Park, Choi, Lee; CVPR 2024).

settings.py         all settings
public_stage.py     the warm-up; images.py are public images that a bundle holds
private_stage.py    the release and the private training; public_gradient.py mixes in public gradients (WarmExt)
standardised.py     the per-example rule of convolutions with standardised weights
audited.py          network of an audit; attacked.py has scores for membership inference
classifier.py       predictions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.methods.dp_classifier.settings import DpClassifierSettings

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


class DpClassifier:
    """See `rapid.methods.base.Method`. The public stage never loads the private one."""

    name = "dp-classifier"
    settings = DpClassifierSettings
    has_public_stage = True
    base: BaseUse = "optional"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: DpClassifierSettings) -> Description:
        """Warm up the classifier."""
        from rapid.methods.dp_classifier.public_stage import train_public

        return train_public(builder, public, settings)

    def releases(
        self, settings: DpClassifierSettings, facts: PublicFacts, base: Bundle | None
    ) -> Sequence[DpSgdSpec | QuerySpec]:
        """The training of the classifier."""
        from rapid.methods.dp_classifier.private_stage import releases

        return releases(settings, facts, base)

    def check_base(self, base: Bundle | None, settings: DpClassifierSettings) -> None:
        """Public images, if they are wanted; see `rapid.methods.base.Checking`."""
        from rapid.methods.dp_classifier.private_stage import check_base

        check_base(base, settings)

    def train_private(
        self, access: PrivateAccess, base: Bundle | None, settings: DpClassifierSettings
    ) -> Mapping[str, Component]:
        """Train the classifier."""
        from rapid.methods.dp_classifier.private_stage import train_private

        return train_private(access, base, settings)

    def describe_private(self, settings: DpClassifierSettings, base: Bundle | None, budget: Budget) -> Description:
        """Warm-up and views."""
        from rapid.methods.dp_classifier.private_stage import describe_private

        return describe_private(settings, base, budget)

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """That public images are not protected."""
        if base is None:
            return []
        return [
            "Images that were given as public are not protected; no check is made that no private image is among them."
        ]

    def trained_parameters(self, settings: DpClassifierSettings, classes: int) -> int:
        """Number of trained parameters of the network."""
        from rapid.methods.dp_classifier.private_stage import trained_parameters

        return trained_parameters(settings, classes)

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> None:
        """None: it makes no images."""

    def classifier(self, bundle: Bundle, device: torch.device) -> Classifier:
        """The network of the bundle."""
        from rapid.methods.dp_classifier.classifier import WideResNetClassifier

        return WideResNetClassifier(bundle, device)

    def audited(self, bundle: Bundle) -> Sequence[Subject]:
        """The classifier; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dp_classifier.audited import subjects

        return subjects(bundle)

    def membership_scores(
        self, bundle: Bundle, images: ImageSet, device: torch.device
    ) -> Mapping[str, NDArray[np.float64]]:
        """Confidence in the labels; see `rapid.methods.base.Inspectable`."""
        from rapid.methods.dp_classifier.attacked import membership_scores

        return membership_scores(bundle, images, device)


METHOD = DpClassifier()
