"""The probe, an image classifier: public features and a privately trained linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.config.sections import ImageSettings, ProbeSettings
from rapid.nn.groups import group_count
from rapid.nn.storage import StoredNetwork

COMPONENT = "probe"
"""Its name in a bundle."""
SPREAD, FLOOR = -0.25, 0.01
"""Partial whitening: the features are scaled by (variance + FLOOR of the largest) to the power SPREAD."""
CONSTANT = 0.3
"""The last feature is this constant, so that the linear layer needs no bias."""
GRID = 4
"""The maps of a stage are averaged to at most GRID x GRID before they are projected."""
TEMPERATURE = 0.05
"""Of cosines between mean features of public classes."""


class Probe(StoredNetwork):
    """Features of images and a linear classifier on them.

    The trunk is trained on the classes of public images; the feature maps of its last stages are projected onto their
    principal components. A linear layer on such features needs little privacy, because few numbers are trained and
    their norms are bounded. No layer mixes examples.

    Args:
        config: image_channels, image_size, channels, features, public_classes, num_classes (0: not yet trained), stages
            (1 where it is missing: bundles of earlier versions).
    """

    widths: tuple[int, ...]
    """Numbers that each used stage gives for an image, the last stage first; the whole trunk gives widths[0]."""
    mean: Tensor
    projection: Tensor
    prototypes: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.num_classes: int = config["num_classes"]
        width, size = config["channels"], (config["image_size"] + 1) // 2
        layers: list[nn.Module] = [nn.Conv2d(config["image_channels"], width, 5, 2, 2), nn.ReLU()]
        ends, widths = [len(layers)], [_pooled_width(width, size)]
        while size > GRID or len(layers) == 2:
            outputs = min(2 * width, 4 * config["channels"])
            for inputs in (width, outputs):
                layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(group_count(outputs), outputs), nn.ReLU()]
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
            width, size = outputs, (size + 1) // 2
            ends.append(len(layers))
            widths.append(_pooled_width(width, size))
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        stages = min(config.get("stages", 1), len(ends))
        self._ends = ends[::-1][:stages]
        self.widths = tuple(widths[::-1][:stages])
        dimensions = min(config["features"], *self.widths)
        self.register_buffer("mean", torch.zeros(sum(self.widths)))
        self.register_buffer("projection", torch.zeros(sum(self.widths), dimensions))
        self.register_buffer("prototypes", torch.zeros(config["public_classes"], stages * dimensions + 1))
        self.head: nn.Module = nn.Identity()
        if self.num_classes:
            self.head = nn.Linear(stages * dimensions + 1, self.num_classes, bias=False)
            nn.init.zeros_(self.head.weight)

    @classmethod
    def build(cls, image: ImageSettings, settings: ProbeSettings, public_classes: int) -> Self:
        """A new probe of the configured shape, without a linear layer."""
        return cls(
            {
                "image_channels": image.channels,
                "image_size": image.size,
                "channels": settings.channels,
                "features": settings.features,
                "stages": settings.stages,
                "public_classes": public_classes,
                "num_classes": 0,
            }
        )

    def with_classes(self, num_classes: int) -> Self:
        """A copy with an untrained linear layer for `num_classes` classes: all are equally likely."""
        model = type(self)(self.config | {"num_classes": num_classes})
        state = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("head.")}
        model.load_state_dict(model.state_dict() | state)
        return model.train(self.training).to(self.mean.device)

    def with_prototypes(self, prototypes: Tensor) -> Self:
        """A copy for other public classes, with their mean features, float (public_classes, d + 1)."""
        model = type(self)(self.config | {"public_classes": len(prototypes)})
        model.load_state_dict(self.state_dict() | {"prototypes": prototypes})
        return model.train(self.training).to(self.mean.device)

    def outputs(self, images: Tensor) -> tuple[Tensor, ...]:
        """Averaged feature maps of the last stages, float (N, F) of each, the last stage first; F as in `widths`.

        Args:
            images: (N, C, H, W) in [-1, 1].
        """
        found, maps = {}, images
        for end, layer in enumerate(self.trunk, 1):
            maps = layer(maps)
            if end in self._ends:
                found[end] = _pooled(maps)
        return tuple(found[end] for end in self._ends)

    def fit_projection(self, moments: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Set the projections of stages onto the first principal components of their maps, partially whitened.

        Args:
            moments: of `outputs` on public images, of each stage: mean, (F,), and covariance, float64 (F, F).
        """
        means, projections = [], []
        for mean, covariance in moments:
            values, vectors = torch.linalg.eigh(covariance.double())
            count = self.projection.shape[1]
            values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
            means.append(mean)
            projections.append(vectors * (values + FLOOR * values[0]).clamp_min(1e-12) ** SPREAD)
        self.mean.copy_(torch.cat(means))
        self.projection.copy_(torch.cat(projections))

    def features(self, images: Tensor) -> Tensor:
        """Vectors of length 1 and a constant, float (N, d + 1), of images (N, C, H, W) in [-1, 1].

        The principal components of each stage have the same length.
        """
        parts = zip(self.outputs(images), self.mean.split(self.widths), self.projection.split(self.widths), strict=True)
        units = [F.normalize((maps - mean) @ projection, dim=1) for maps, mean, projection in parts]
        return F.pad(torch.cat(units, 1) / len(units) ** 0.5, (0, 1), value=CONSTANT)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float (N, num_classes), of images (N, C, H, W) in [-1, 1]."""
        logits: Tensor = self.head(self.features(images))
        return logits

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """Probability of each class, float (N, num_classes), of images (N, C, H, W) in [-1, 1]."""
        found: Tensor = self(images)
        return found.softmax(1)

    @torch.no_grad()
    def resemblance(self) -> Tensor:
        """How much each class resembles each public class, (num_classes, public_classes); rows sum to 1.

        From the mean features of the public classes: p(class | mean of l) of every public class l, normalised over l.
        Public classes without images have no prototype, and weight 0.
        """
        known = self.prototypes[:, -1] > 0
        likelihood: Tensor = self.head(self.prototypes).softmax(1).T * known
        return likelihood / likelihood.sum(1, keepdim=True)


def _pooled(maps: Tensor) -> Tensor:
    """Maps averaged to at most GRID x GRID, and flattened."""
    factor = -(-maps.shape[-1] // GRID)
    # the adaptive form's gradient is not deterministic on a GPU
    return F.avg_pool2d(maps, factor, ceil_mode=True).flatten(1) if factor > 1 else maps.flatten(1)


def _pooled_width(channels: int, size: int) -> int:
    factor = -(-size // GRID)
    return channels * (-(-size // factor)) ** 2


def class_similarity(own: Tensor, known: Tensor) -> Tensor:
    """How much public classes resemble other public classes, float (m, n); rows sum to 1.

    Args:
        own: mean features, float (m, d + 1).
        known: mean features of the others, float (n, d + 1).
    """
    # without the constant, the last feature
    cosines = F.normalize(own[:, :-1], dim=1) @ F.normalize(known[:, :-1], dim=1).T
    return (cosines / TEMPERATURE).softmax(1)
