"""The network calls of a linear sampler as a table: rows at different calls of different samplers can share a batch.

A linear sampler combines what it has seen with fixed weights. A row has parts, all of the shape of an image: X, the
input of the next call; KEPT, what the sampler keeps over calls; then the outputs of calls; then fresh noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

X, KEPT, OUTPUT = range(3)
"""Indices of parts. X and KEPT begin as the first state; outputs are stored from OUTPUT on."""


class CallTable(NamedTuple):
    """All calls of a sampler."""

    times: Tensor
    """What the network is told in each call, (calls,): its timestep, int64, or its noise level, float32."""
    slots: Sequence[int]
    """The part that holds the output of each call, >= OUTPUT. The part after it holds fresh noise, if there is any."""
    noisy: Sequence[bool]
    """Whether fresh noise enters after each call."""
    weights: Tensor
    """What X and KEPT become after each call, of all parts, float32 (calls, 2, parts). The last X is the image."""
    first_level: float = 1.0
    """Standard deviation of the first state, if it is noise."""


def combine(weights: Tensor, parts: Tensor) -> Tensor:
    """What X and KEPT become after calls, float (n, 2, ...).

    Args:
        weights: of the calls, float (n, 2, p).
        parts: of the rows, float (n, p, ...).
    """
    return torch.bmm(weights, parts.flatten(2)).view(len(parts), 2, *parts.shape[2:])
