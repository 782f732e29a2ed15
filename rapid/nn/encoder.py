"""The trajectory encoder h: a one-step-denoised latent of step k to a unit vector (Algorithm 1)."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.config.sections import Settings
from rapid.nn.groups import group_count
from rapid.nn.storage import StoredNetwork


class _Block(nn.Module):
    """Pre-activation residual block; group normalisation, so that examples never mix."""

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


class TrajectoryEncoder(StoredNetwork):
    """h(x): latents (N, c, h, w) to unit vectors (N, features); cosine similarity and l2 order neighbours alike."""

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
        # latents are spatial: where a stroke lies matters, so nothing is pooled away before the last layer
        self.last = nn.Linear(width * size * size, config["features"])

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """A new encoder of the shape that the settings ask for."""
        return cls(
            {
                "channels": settings.encoder.channels,
                "features": settings.encoder.features,
                "latent_channels": settings.latent_channels,
                "latent_size": settings.latent_size,
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """Unit vectors, float (N, features), of one-step-denoised latents, float (N, c, h, w)."""
        hidden = F.silu(self.blocks(self.first(x)))
        return F.normalize(self.last(torch.flatten(hidden, 1)), dim=1)
