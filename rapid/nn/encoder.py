"""The trajectory encoder h: maps the one-step-denoised latent of step k to a unit vector (Algorithm 1)."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.nn.groups import group_count
from rapid.nn.storage import StoredNetwork


class _Block(nn.Module):
    """Pre-activation residual block with group normalisation, so that examples do not mix."""

    def __init__(self, inputs: int, outputs: int, groups: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        result: Tensor = hidden + self.skip(x)
        return result


class Widths(Protocol):
    """Widths of an encoder."""

    @property
    def channels(self) -> int:
        """Channels of the first convolution."""
        ...

    @property
    def features(self) -> int:
        """Length of the unit vectors."""
        ...


class EncoderShape(Protocol):
    """The settings that shape an encoder."""

    @property
    def encoder(self) -> Widths:
        """Its widths."""
        ...

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a latent."""
        ...


class TrajectoryEncoder(StoredNetwork):
    """Maps latents (N, c, h, w) to unit vectors (N, features), on which l2 distance and cosine rank neighbours alike.

    Args:
        config: JSON-ready: channels, features, latent_channels, latent_size.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        channels, size = config["channels"], config["latent_size"]
        groups = group_count(channels)
        self.first = nn.Conv2d(config["latent_channels"], channels, 3, 1, 1)
        blocks: list[nn.Module] = [_Block(channels, 2 * channels, groups, 1)]
        width = 2 * channels
        while size > 4:
            blocks.append(_Block(width, min(2 * width, 8 * channels), groups, 2))
            width, size = min(2 * width, 8 * channels), (size + 1) // 2
        self.blocks = nn.Sequential(*blocks)
        # no global pooling: the position of a stroke matters
        self.last = nn.Linear(width * size * size, config["features"])

    @classmethod
    def build(cls, settings: EncoderShape) -> Self:
        """A new encoder with random weights."""
        latent_channels, latent_size, _ = settings.latent_shape
        return cls(
            {
                "channels": settings.encoder.channels,
                "features": settings.encoder.features,
                "latent_channels": latent_channels,
                "latent_size": latent_size,
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """Unit vectors, float (N, features), of one-step-denoised latents, float (N, c, h, w)."""
        hidden = F.silu(self.blocks(self.first(x)))
        return F.normalize(self.last(torch.flatten(hidden, 1)), dim=1)
