"""Samplers of DPDM, deterministic and stochastic: from noise to an image by calls of a denoiser D(x; sigma).

A sampler is a list of network calls. Each sampler here is linear: what follows a call is a fixed combination of the
state before it, the denoised image and fresh noise. So a row needs no sampler object, rows at different calls of
different samplers can share a batch, and each row takes its noise from its own stream. The function that makes the list
reads like the algorithm in the paper, with `X`, `KEPT`, `DENOISED` and `NOISE` in place of images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.diffusion.call_table import OUTPUT, CallTable
from rapid.diffusion.preconditioning import SIGMA_MIN, sampling_levels

SamplerName = Literal["ddim", "stochastic-ddim", "churn"]
Combination = NDArray[np.float64]
"""Weights of X, KEPT, DENOISED and NOISE, float64 (4,)."""
X, KEPT, DENOISED, NOISE = np.eye(4)
LARGEST_GAMMA = math.sqrt(2) - 1


@dataclass(frozen=True)
class Churn:
    """How much noise the Churn sampler adds between its steps (EDM, Algorithm 2).

    Attributes:
        amount: S_churn, over all steps; 0: none.
        least: S_min, the lowest level at which it is added.
        most: S_max, the highest.
        scale: S_noise, standard deviation of the noise.
    """

    amount: float = 0.0
    least: float = 0.0
    most: float = math.inf
    scale: float = 1.0


class Call(NamedTuple):
    """One network call: D(X; sigma) gives DENOISED."""

    sigma: float
    """Level of X."""
    x: Combination
    """What X becomes: after the last call the image, otherwise the input of the next call."""
    kept: Combination = KEPT
    """What KEPT becomes."""


Sampler = Callable[[Sequence[float], Churn], Iterator[Call]]
"""(levels, descending; churn, which only one of them uses) -> calls."""


def ddim(levels: Sequence[float], churn: Churn) -> Iterator[Call]:
    """Deterministic DDIM (DPDM, Algorithm 3): Euler steps of the probability flow, and a last denoising."""
    for sigma, after in itertools.pairwise(levels):
        yield Call(sigma, X + (after - sigma) / sigma * (X - DENOISED))
    yield Call(levels[-1], DENOISED)


def stochastic_ddim(levels: Sequence[float], churn: Churn) -> Iterator[Call]:
    """Stochastic DDIM (DPDM, Algorithm 3): Euler-Maruyama steps of the reverse diffusion, and a last denoising."""
    for sigma, after in itertools.pairwise(levels):
        drift = 2 * (after - sigma) / sigma * (X - DENOISED)
        yield Call(sigma, X + drift + math.sqrt(2 * (sigma - after) * sigma) * NOISE)
    yield Call(levels[-1], DENOISED)


def heun_churn(levels: Sequence[float], churn: Churn) -> Iterator[Call]:
    """Churn (DPDM, Algorithm 4): before each step noise is added, then a step of Heun's second-order method to 0."""
    raised = [_raised(sigma, len(levels), churn) for sigma in levels]
    added = [churn.scale * math.sqrt(high**2 - low**2) for high, low in zip(raised, levels, strict=True)]
    # X arrives with the noise of the step that begins
    for sigma, after, noise in zip(raised, [*levels[1:], 0.0], [*added[1:], 0.0], strict=True):
        slope = (X - DENOISED) / sigma
        euler = X + (after - sigma) * slope
        if after == 0:
            yield Call(sigma, euler)
            return
        half = (after - sigma) / 2
        yield Call(sigma, x=euler, kept=X + half * slope)
        slope = (X - DENOISED) / after
        yield Call(after, x=KEPT + half * slope + noise * NOISE)


SAMPLERS: dict[str, Sampler] = {"ddim": ddim, "stochastic-ddim": stochastic_ddim, "churn": heun_churn}


@dataclass(frozen=True, eq=False)
class Path:
    """All calls of an image, as tables.

    Attributes:
        first_level: standard deviation of the first X.
        sigmas: levels of the calls, float32 (calls,).
        weights: what X and KEPT become, of X, KEPT, DENOISED and NOISE, float32 (calls, 2, 4).
    """

    first_level: float
    sigmas: Tensor
    weights: Tensor

    @classmethod
    def build(cls, name: SamplerName, steps: int, churn: Churn | None = None, last_level: float = SIGMA_MIN) -> Self:
        """The path of a sampler.

        Args:
            name: the sampler.
            steps: M, number of levels from SIGMA_MAX to `last_level`; Churn makes 2 M - 1 calls, the others M.
            churn: for Churn.
            last_level: the lowest level; the image is what is denoised at it.
        """
        levels, churn = sampling_levels(steps, last_level).tolist(), churn or Churn()
        calls = list(SAMPLERS[name](levels, churn))
        first = levels[0]
        if name == "churn":
            # noise of standard deviation sigma, and the noise that the first step adds to it
            first = math.hypot(first, churn.scale * math.sqrt(calls[0].sigma ** 2 - first**2))
        weights = torch.from_numpy(np.stack([np.stack([call.x, call.kept]) for call in calls]))
        return cls(first, torch.tensor([call.sigma for call in calls]), weights.float())

    def __len__(self) -> int:
        """Number of network calls."""
        return len(self.sigmas)

    @property
    def noisy(self) -> list[bool]:
        """Which calls need fresh noise."""
        found: list[bool] = (self.weights[:, :, 3] != 0).any(1).tolist()
        return found

    @cached_property
    def table(self) -> CallTable:
        """All calls; each output takes the place of the one before it."""
        return CallTable(self.sigmas, (OUTPUT,) * len(self), self.noisy, self.weights, self.first_level)


def _raised(sigma: float, steps: int, churn: Churn) -> float:
    """The level to which noise is added before a step."""
    gamma = min(churn.amount / steps, LARGEST_GAMMA) if churn.least <= sigma <= churn.most else 0.0
    return (1 + gamma) * sigma
