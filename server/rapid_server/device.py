"""Devices that fail while the server runs."""

from __future__ import annotations

import torch


def answers(device: torch.device) -> bool:
    """Whether a device still computes: after an illegal access to its memory a GPU does not, for this process."""
    try:
        return float(torch.ones(1, device=device).sum()) == 1
    except RuntimeError:
        return False
