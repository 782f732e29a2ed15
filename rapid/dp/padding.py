"""Padding of Poisson batches to a size that depends on public numbers alone.

The guarantee is about what is released. How long a step takes and which memory it reads are not released, but who
shares the machine can see them, and with them how many examples were drawn. Padded batches hide that number: each step
computes as many gradients, in pieces of one size, and those of the padding count as zero. The result is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.stats import binom
from torch import Tensor

from rapid.dp.randomness import Randomness

OVERFLOW = 2.0**-40
"""Largest probability that a batch does not fit; it is then padded to whole pieces, and one more piece shows."""


class PaddedBatch(NamedTuple):
    """Positions to compute gradients of, and which of them were drawn.

    Attributes:
        indices: int64 (n,).
        drawn: bool (n,).
    """

    indices: Tensor
    drawn: Tensor


def padded_size(examples: int, sample_rate: float, piece: int) -> int:
    """The least multiple of `piece` that a Poisson batch exceeds with a probability of at most OVERFLOW.

    Args:
        examples: number of examples to draw from.
        sample_rate: probability of each.
        piece: examples that are computed at a time.
    """
    largest = int(binom.isf(OVERFLOW, examples, sample_rate)) if sample_rate < 1 else examples
    return _whole(largest, piece)


def pad(indices: Tensor, examples: int, size: int, piece: int, randomness: Randomness) -> PaddedBatch:
    """Fill a batch up with uniformly random positions.

    Args:
        indices: what was drawn, int64 (n,), on the CPU.
        examples: number of examples to draw from; without any, nothing is padded.
        size: a multiple of `piece`; a larger batch is padded to the next multiple.
        piece: examples that are computed at a time.
        randomness: secret.
    """
    missing = max(size, _whole(len(indices), piece)) - len(indices) if examples else 0
    # uniform numbers lie in (0, 1]
    filling = (randomness.uniform(missing) * examples).ceil().long().clamp(1, max(1, examples)) - 1
    drawn = torch.arange(len(indices) + missing) < len(indices)
    return PaddedBatch(torch.cat([indices, filling]), drawn)


def _whole(count: int, piece: int) -> int:
    return -(-count // piece) * piece
