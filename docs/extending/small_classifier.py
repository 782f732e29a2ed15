"""A method with DP-SGD in one file: a small classifier of images, trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.bundle import Bundle, Component
from rapid.bundle.builder import BundleBuilder
from rapid.config.sections import DpSgdSettings, ImageSettings, MethodSettings, SamplingSettings, Section
from rapid.data import to_unit_range
from rapid.dp import Budget, DpSgdSpec, Execution, PrivateAccess, PublicFacts
from rapid.dp.objective import Objective
from rapid.dp.training_spec import training_spec
from rapid.errors import InputError
from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.nn.storage import StoredNetwork
from rapid.sampling.classifier import NetworkClassifier
from rapid.training import Trainer
from rapid.training.optimizers import build_optimizer, noisy_schedule, select_trainable, trained_count

PATCH, STRIDE = 8, 4


class NetworkSettings(Section):
    """The network."""

    width: int = Field(32, ge=1, description="channels of the convolution")


class SmallClassifierSettings(MethodSettings):
    """All settings; every method with DP-SGD has those of `private`, with defaults of its own."""

    method: Literal["small-classifier"] = "small-classifier"
    image: ImageSettings = ImageSettings(size=28)
    network: NetworkSettings = NetworkSettings()
    private: DpSgdSettings = DpSgdSettings(steps=200, expected_batch=500, learning_rate=0.01)


class Network(StoredNetwork):
    """Logits, float (n, classes), of images, float (n, C, S, S); built from `config` alone."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        places = (config["size"] - PATCH) // STRIDE + 1
        self.convolution = nn.Conv2d(config["channels"], config["width"], PATCH, stride=STRIDE)
        self.head = nn.Linear(config["width"] * places**2, config["classes"])

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images in [-1, 1]."""
        return self.head(F.gelu(self.convolution(images)).flatten(1))


def build(settings: SmallClassifierSettings, classes: int) -> Network:
    """A network with random weights."""
    image = settings.image
    sizes = {"size": image.size, "channels": image.channels, "width": settings.network.width, "classes": classes}
    return Network(sizes)


class Losses(Objective):
    """Cross-entropies, float (n,): row i depends on row i of images and labels alone."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self._network, self._device = network, device

    def prepare(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """What the network has no part in: images in [-1, 1] and labels, on the device."""
        images, labels = rows
        return to_unit_range(images.cpu().numpy(), self._device), labels.to(self._device)

    def compute(self, *prepared: Tensor) -> Tensor:
        """The losses, by the network."""
        images, labels = prepared
        return F.cross_entropy(self._network(images), labels, reduction="none")


class SmallClassifier:
    """See `rapid.methods.base.Method`, and `Classifying` for `classifier`."""

    name: ClassVar[str] = "small-classifier"
    settings = SmallClassifierSettings
    has_public_stage = False
    base: ClassVar[BaseUse] = "none"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: Any) -> Description:
        """It has no public stage."""
        raise InputError("preset", "small-classifier has no public stage")

    def releases(self, settings: Any, facts: PublicFacts, base: Bundle | None) -> Sequence[DpSgdSpec]:
        """One training: steps, batch, clip norm, multiplicity and band by the settings, N by the facts."""
        if not facts.classes:
            raise InputError("private", "needs labels: small-classifier learns them")
        if settings.image.size < PATCH:
            raise InputError("image.size", f"must be at least {PATCH}", settings.image.size)
        return [training_spec("classifier", "a small classifier", settings.private, facts)]

    def train_private(self, access: PrivateAccess, base: Bundle | None, settings: Any) -> Mapping[str, Component]:
        """Train; the network has the averaged weights then."""
        own, device = settings.private, access.device
        network = build(settings, len(access.facts.classes)).to(device)
        select_trainable(network, own.trainable)
        optimizer = build_optimizer(network, own)
        access.train(
            "classifier",
            Trainer(network, optimizer, noisy_schedule(optimizer, own.steps), ema_decay=own.ema_decay),
            Losses(network, device),
            [access.images, access.labels],
            # without it the settings of how a training runs have no effect
            execution=Execution.of(own),
        )
        return {"classifier": network}

    def describe_private(self, settings: Any, base: Bundle | None, budget: Budget) -> Description:
        """For the card and `rapid info`."""
        return Description("A small classifier, trained from scratch.\n", {"task": "image-classification"})

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """Nothing beyond the statement."""
        return []

    def trained_parameters(self, settings: Any, classes: int) -> int:
        """For `rapid plan`; no memory is needed."""
        return trained_count(lambda: build(settings, classes), settings.private.trainable)

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> None:
        """None: it makes no images."""

    def classifier(self, bundle: Bundle, device: torch.device) -> NetworkClassifier:
        """For `rapid predict`, `rapid evaluate` and the server."""
        return NetworkClassifier(bundle, bundle.classes, device, bundle.component("classifier", Network).to(device))


METHOD = SmallClassifier()
