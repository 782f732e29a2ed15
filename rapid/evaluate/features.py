"""The feature space of the fidelity measures: a small network trained on the given images, without any download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, join
from rapid.evaluate.networks import Classifier
from rapid.evaluate.training import extract_features, probabilities, train_classifier

EPOCHS = 5


@dataclass(frozen=True)
class FeatureSpace:
    """A network and the description of its features.

    Attributes:
        network: trained, in evaluation mode.
        words: description for the report: the layer, the network and its training images.
        device: where the network is.
        form: the images that it takes; smaller ones are padded with black.
    """

    network: Classifier
    words: str
    device: torch.device
    form: ImageSettings

    def extract(self, images: NDArray[np.uint8], title: str) -> NDArray[np.float64]:
        """Features, float64 (N, d), of images uint8 (N, H, W) or (N, H, W, 3); progress under `title`."""
        return extract_features(self.network, self._fit(images), self.device, title)

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Probabilities of the network's classes, float64 (N, classes), of images as for `extract`."""
        return probabilities(self.network, self._fit(images), self.device)

    def _fit(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return fit_images(ImageSet(images, None, ()), self.form, "features").images


def train_feature_space(
    public: Sequence[ImageSet], real: ImageSet, device: torch.device, epochs: int = EPOCHS
) -> FeatureSpace:
    """Train a small CNN on the labelled public sets; its penultimate layer is the feature space.

    Without labelled public sets it is trained on the real test images.

    Args:
        public: public sets; unlabelled ones are ignored.
        real: real test images; they need labels if no public set has any.
        device: where to train.
        epochs: passes over the images.

    Raises:
        InputError: no set has labels, or too few images.
    """
    labelled = [images for images in public if images.labels is not None]
    images = join(labelled, "public") if labelled else real
    trained = train_classifier("small", images, device, "feature network", epochs)
    names = ", ".join(Path(s.source).name for s in labelled) if labelled else Path(real.source).name
    kind = "public images" if labelled else "real test images themselves"
    words = (
        f"the penultimate layer (128 numbers) of a small CNN trained for {epochs} epochs on the {kind} ({names}, "
        f"{len(images):,} images, {len(images.classes)} classes). Comparable only between reports that use the "
        "same network; not FID."
    )
    form = ImageSettings(size=images.images.shape[1], channels=1 if images.channels == 1 else 3)
    return FeatureSpace(trained.network, words, device, form)
