"""A wide residual network without batch normalisation, for private training: group norm and standardised weights.

Sources: Zagoruyko and Komodakis: Wide Residual Networks (2016), pre-activation blocks; De, Berrada, Hayes, Smith, and
Balle: Unlocking High-Accuracy Differentially Private Image Classification through Scale (2022), with 16 groups instead
of batch normalisation, and standardised weights (Qiao et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.config.sections import ImageSettings
from rapid.nn.storage import StoredNetwork

STEM = 16
"""Channels of the first convolution."""
EPSILON = 1e-5
"""Added to the variance of a filter."""


def standardised(weight: Tensor) -> Tensor:
    """Filters of mean 0 and variance 1 / fan-in, up to EPSILON; the same shape as `weight`, (out, in, h, w).

    It is a layer normalisation of each filter, so that one operation uses the weight, once.
    """
    return F.layer_norm(weight, weight.shape[1:], eps=EPSILON) / math.sqrt(weight[0].numel())


class StandardisedConv2d(nn.Conv2d):
    """A convolution with standardised filters: it does not depend on the mean or, almost, the scale of a filter."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        """As `nn.Conv2d`."""
        found: Tensor = self._conv_forward(input, standardised(self.weight), self.bias)
        return found


class Widths(Protocol):
    """The settings that shape a network."""

    @property
    def depth(self) -> int:
        """Number of layers: 6 n + 4 with n blocks in each of three stages."""
        ...

    @property
    def width(self) -> int:
        """Factor of the widths 16, 32, 64 of the stages."""
        ...

    @property
    def groups(self) -> int:
        """Of the group normalisations."""
        ...

    @property
    def stride(self) -> int:
        """Of the first convolution."""
        ...


class WideResNet(StoredNetwork):
    """Maps images, float (N, C, S, S) in [-1, 1], to logits, float (N, classes). No layer mixes examples.

    Args:
        config: JSON-ready: depth, width, groups, stride, image_channels, classes (their names).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.classes: tuple[str, ...] = tuple(config["classes"])
        groups, blocks = config["groups"], (config["depth"] - 4) // 6
        self.stem = _convolution(config["image_channels"], STEM, 3, config["stride"])
        inputs, stages = STEM, list[nn.Module]()
        for stage in range(3):
            outputs = (STEM << stage) * config["width"]
            for number in range(blocks):
                stages.append(_Block(inputs, outputs, groups, 2 if stage and not number else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.norm = _norm(groups, inputs)
        self.head = nn.Linear(inputs, len(self.classes))

    @classmethod
    def build(cls, image: ImageSettings, settings: Widths, classes: Sequence[str]) -> Self:
        """A new network with random weights."""
        return cls(
            {
                "depth": settings.depth,
                "width": settings.width,
                "groups": settings.groups,
                "stride": settings.stride,
                "image_channels": image.channels,
                "classes": list(classes),
            }
        )

    def with_classes(self, classes: Sequence[str]) -> Self:
        """A copy for other classes: their rows of the last layer are those of equal names here, or zero."""
        model = type(self)(self.config | {"classes": list(classes)})
        state = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("head.")}
        model.load_state_dict(model.state_dict() | state)
        place = {name: number for number, name in enumerate(self.classes)}
        with torch.no_grad():
            for own, other in ((model.head.weight, self.head.weight), (model.head.bias, self.head.bias)):
                own.zero_()
                for number, name in enumerate(classes):
                    if name in place:
                        own[number] = other[place[name]]
        return model.train(self.training).to(self.head.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float (N, classes), of images, float (N, C, S, S) in [-1, 1]."""
        hidden = F.relu(self.norm(self.blocks(self.stem(x))))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions, each preceded by normalisation."""

    def __init__(self, inputs: int, outputs: int, groups: int, stride: int) -> None:
        super().__init__()
        self.norm1 = _norm(groups, inputs)
        self.conv1 = _convolution(inputs, outputs, 3, stride)
        self.norm2 = _norm(groups, outputs)
        self.conv2 = _convolution(outputs, outputs, 3, 1)
        self.skip = None if (inputs, stride) == (outputs, 1) else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        hidden = self.conv2(F.relu(self.norm2(self.conv1(active))))
        result: Tensor = hidden + (x if self.skip is None else self.skip(active))
        return result


def _norm(groups: int, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(groups, channels), channels)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> StandardisedConv2d:
    return StandardisedConv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
