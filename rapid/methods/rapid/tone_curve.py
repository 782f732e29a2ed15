"""The curve of tones, a table that maps the levels of generated pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
