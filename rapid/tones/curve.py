"""The curve of tones, a table that maps the levels of generated pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data.fit import from_planes, to_planes
from rapid.nn.storage import StoredNetwork

NAME = "tones"
"""Of the component, and of the release behind it."""
LEVELS = 256


class ToneCurve(StoredNetwork):
    """Maps levels of pixels, by channel. A new one changes nothing.

    Args:
        config: JSON-ready: channels.

    Attributes:
        table: the new level of each level, uint8 (channels, LEVELS), not decreasing in a row.
    """

    table: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        levels = torch.arange(LEVELS, dtype=torch.uint8)
        self.register_buffer("table", levels.repeat(config["channels"], 1))

    def forward(self, planes: Tensor) -> Tensor:
        """Planes of other levels, uint8 (N, C, H, W), of uint8 (N, C, H, W)."""
        channels = torch.arange(len(self.table), device=planes.device).view(-1, 1, 1)
        return self.table[channels, planes.long()]


def stored_tones(bundle: Bundle) -> ToneCurve | None:
    """The curve of a bundle, if it has one."""
    return bundle.component(NAME, ToneCurve) if bundle.has(NAME) else None


def toned(latents: Tensor, tones: ToneCurve | None) -> NDArray[np.uint8]:
    """Images, uint8 (n, H, W) or (n, H, W, 3), of pixels in [-1, 1], clamped, float (n, C, H, W), with their tones."""
    planes = to_planes(latents)
    return from_planes((planes if tones is None else tones(planes)).cpu().numpy())
