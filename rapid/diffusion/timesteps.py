"""Distributions of the timestep of a diffusion loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TimestepMixture:
    """A mixture of uniform distributions over neighbouring ranges of 1..T (Ghalebikesabi et al., "DP diffusion").

    Part i has weight w_i and is uniform over b_i + 1..b_{i + 1}. The losses are not weighted by the inverse of the
    probabilities, as in the paper: the mixture decides what the network is trained for.

    Args:
        weights: w, at least 0, sum 1.
        breaks: b, ascending from 0 to T; one more than weights.
    """

    def __init__(self, weights: Sequence[float], breaks: Sequence[int]) -> None:
        lengths = torch.tensor(breaks).diff()
        self.probabilities = torch.tensor(weights, dtype=torch.float64).div(lengths).repeat_interleave(lengths)
        """Of the timesteps 1..T, float64 (T,)."""
        self._cumulated = self.probabilities.cumsum(0)
        # rounding must not leave a part of [0, 1] without a timestep
        self._cumulated[self.probabilities.nonzero().max() :] = 1.0

    def quantile(self, uniform: Tensor) -> Tensor:
        """Timesteps by inversion of the distribution function.

        Args:
            uniform: float64 (N,) in [0, 1], on the CPU.

        Returns:
            int64 (N,), each in 1..T.
        """
        # a uniform number of 0 would find a first timestep of probability 0
        return torch.searchsorted(self._cumulated, uniform.clamp(min=1e-18)) + 1
