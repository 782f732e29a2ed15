"""A complete method in one file: the noisy mean image of each class, and images around it.

One `mean` release, no public stage, one call an image. It stands outside of rapid and comes in by an entry point:

    [project.entry-points."rapid.methods"]
    class-means = "class_means:METHOD"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from rapid.bundle import Bundle, Component
from rapid.bundle.builder import BundleBuilder
from rapid.config.sections import ImageSettings, MethodSettings, PrivateSettings, SamplingSettings
from rapid.data import to_uint8, to_unit_range
from rapid.dp import PrivateAccess, PublicFacts, QuerySpec
from rapid.dp.budget import Budget
from rapid.errors import InputError
from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.nn.storage import StoredNetwork
from rapid.sampling.one_call import OneCallTrajectories
from rapid.sampling.streams import Streams, normal


class MeansSettings(PrivateSettings):
    """The private stage."""

    bound: float = Field(16.0, gt=0, description="l2 norm to which an image (pixels in [0, 1], and a one) is clipped")


class VariationSettings(SamplingSettings):
    """How images are sampled."""

    deviation: float = Field(0.1, ge=0, description="standard deviation of the pixels around the mean, in [-1, 1]")


class ClassMeansSettings(MethodSettings):
    """All settings."""

    method: Literal["class-means"] = "class-means"
    image: ImageSettings = ImageSettings(size=32)
    private: MeansSettings = MeansSettings()
    generation: VariationSettings = VariationSettings(attempts=1)


class Means(StoredNetwork):
    """Mean images, float (classes, C, H, W) in [-1, 1]."""

    images: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.register_buffer("images", torch.zeros(config["shape"]))


class ClassMeansGenerator:
    """A class mean and noise; implements `rapid.sampling.generator.Generator`."""

    steps = max_steps = attempts = 1
    confidence = 0.0
    records = 0
    probed = False

    def __init__(self, bundle: Bundle, device: torch.device, generation: VariationSettings) -> None:
        self.bundle, self.classes, self.image_shape = bundle, bundle.classes, bundle.image_shape
        self._means = bundle.component("means", Means).to(device)
        self.latent_shape: tuple[int, ...] = tuple(self._means.images.shape[1:])
        self.batch_size, self._deviation = generation.batch_size, generation.deviation

    def calls(self, steps: int | None = None) -> int:
        return 1

    def trajectories(self) -> OneCallTrajectories:
        return OneCallTrajectories(self._sample)

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        return to_uint8(latents)

    def label(self, images: NDArray[np.uint8]) -> None:
        return None

    def finish(self, latents: Tensor) -> tuple[NDArray[np.uint8], None]:
        return self.decode(latents), None

    def record_images(self, records: NDArray[np.int64]) -> NDArray[np.uint8]:
        raise InputError("record", "this method has no knowledge base", records[0])

    def _sample(self, streams: Streams, labels: NDArray[np.int64] | None) -> Tensor:
        assert labels is not None
        noise = torch.from_numpy(normal(streams, self.latent_shape)).to(self._means.images.device)
        return self._means.images[labels] + self._deviation * noise


class ClassMeans:
    """See `rapid.methods.base.Method`."""

    name: ClassVar[str] = "class-means"
    settings = ClassMeansSettings
    has_public_stage = False
    base: ClassVar[BaseUse] = "none"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: ClassMeansSettings) -> Description:
        raise InputError("preset", "class-means has no public stage")

    def releases(self, settings: ClassMeansSettings, facts: PublicFacts, base: Bundle | None) -> Sequence[QuerySpec]:
        if not facts.classes:
            raise InputError("private", "needs labels: class-means has a mean for each class")
        size, bound = facts.dataset_size, settings.private.bound
        return [QuerySpec(name="means", kind="mean", title="sum of the images of each class and their number",
                          sensitivity=bound, dataset_size=size)]  # fmt: skip

    def train_private(
        self, access: PrivateAccess, base: Bundle | None, settings: ClassMeansSettings
    ) -> Mapping[str, Component]:
        classes = len(access.facts.classes)

        def features(images: Tensor, labels: Tensor) -> Tensor:
            pixels = (to_unit_range(images.numpy()) + 1) / 2
            counted = F.pad(pixels.flatten(1), (0, 1), value=1.0)
            return F.one_hot(labels, classes)[..., None] * counted[:, None]

        sums = access.mean("means", features, access.images, access.labels)
        means = (sums[:, :-1] / sums[:, -1:].clamp_min(1 / access.facts.dataset_size)).clamp(0, 1) * 2 - 1
        shape = [classes, settings.image.channels, settings.image.size, settings.image.size]
        network = Means({"shape": shape})
        network.images.copy_(means.view(shape))
        return {"means": network}

    def describe_private(self, settings: ClassMeansSettings, base: Bundle | None, budget: Budget) -> Description:
        return Description("Each image is the noisy mean of its class, and noise.\n", {"bound": settings.private.bound})

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        return []

    def trained_parameters(self, settings: ClassMeansSettings, classes: int) -> int:
        return classes * settings.image.size**2 * settings.image.channels

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> ClassMeansGenerator:
        assert isinstance(generation, VariationSettings)
        return ClassMeansGenerator(bundle, device, generation)


METHOD = ClassMeans()
