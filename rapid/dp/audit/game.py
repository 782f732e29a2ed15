"""The one-run game: a lower bound on epsilon from one training, to be compared with the claimed epsilon.

The method is that of Steinke, Nasr and Jagielski (NeurIPS 2023). A fair coin decides whether each of m canaries takes
part. An adversary observes the training and guesses the coins of which it is surest. Too many right guesses refute the
claim, with a stated confidence. No private images are needed: the canaries are random latents.

The adversary is as strong as the guarantee allows. It sees the result of every step and knows the network, the canaries
and their losses, but not the coins, the batches and the noise. Each canary has its own class, and only the class table
is trained, so each canary's gradient has its own row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import ScheduleSettings
from rapid.diffusion import Schedule
from rapid.diffusion.losses import noise_prediction_loss
from rapid.dp.audit.guesses import SHARES, best_bound, canaries_needed, largest_refutable
from rapid.dp.budget import calibrate
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, Release
from rapid.errors import InputError
from rapid.nn import Denoiser
from rapid.nn.denoiser import DenoiserShape
from rapid.progress import Progress

CLIP_NORM = 1e-4
"""Far below the norm of every canary's gradient, so that each counts with its full weight."""
LEARNING_RATE = 10.0
PIECE = 500

Build = Callable[..., PrivateMechanism]
"""(release, network, losses, physical_batch=...) -> the mechanism that is audited."""
Batches = Callable[[int], Tensor]
"""Step from 0 -> probability that a participating canary is in its batch, float64 (m,)."""


class AuditSettings(DenoiserShape, Protocol):
    """The settings that an audit needs."""

    @property
    def schedule(self) -> ScheduleSettings:
        """The variance schedule."""
        ...


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        claimed: epsilon for which the mechanism was calibrated, at `delta`.
        delta: of the claim, and of the bound.
        bound: epsilon is at least this, with probability `confidence`.
        confidence: of `bound`, corrected for all tried shares.
        canaries: m.
        guesses: how many coins were guessed.
        right: how many of the guesses were right.
        steps: of the training.
        noise_multiplier: of the release.
        sample_rate: of the release.
        largest_refutable: the bound if all guesses were right: larger claims cannot be refuted by so few canaries.
        seconds: duration.
    """

    claimed: float
    delta: float
    bound: float
    confidence: float
    canaries: int
    guesses: int
    right: int
    steps: int
    noise_multiplier: float
    sample_rate: float
    largest_refutable: float
    seconds: float

    @property
    def refuted(self) -> bool:
        """Whether the claim is refuted at that confidence."""
        return self.bound > self.claimed

    @property
    def conclusive(self) -> bool:
        """Whether the game could have refuted the claim."""
        return self.largest_refutable > self.claimed

    @property
    def canaries_needed(self) -> int | None:
        """About the least number of canaries that could refute the claim; None if no number can."""
        return canaries_needed(self.claimed, self.delta, self.confidence)


def audit(
    settings: AuditSettings,
    *,
    epsilon: float,
    delta: float,
    canaries: int = 1000,
    steps: int = 50,
    sample_rate: float = 0.25,
    confidence: float = 0.95,
    build: Build = PrivateMechanism,
    batches: Batches | None = None,
) -> Audit:
    """Train on canaries once, and bound epsilon from below.

    Args:
        settings: shape of the denoiser that is trained, and its schedule.
        epsilon: for which the release is calibrated, as in a real training.
        delta: in (0, 1).
        canaries: m, at least 20.
        steps: of the training.
        sample_rate: probability that a participating canary is in a batch.
        confidence: in (0, 1).
        build: makes the mechanism; anything but the default is for tests of the audit itself.
        batches: the adversary's knowledge of the batches; default: that they are Poisson samples.

    Raises:
        InputError: an argument out of range.
    """
    if canaries < round(1 / min(SHARES)):
        raise InputError("canaries", f"must be at least {round(1 / min(SHARES))}", canaries)
    if not 0 < confidence < 1:
        raise InputError("confidence", "must lie in (0, 1)", confidence)
    if not 0 < sample_rate <= 1:
        raise InputError("sample_rate", "must lie in (0, 1]", sample_rate)
    if steps < 1:
        raise InputError("steps", "must be at least 1", steps)
    begin = time.monotonic()
    spec = DpSgdSpec(
        name="audit",
        dataset_size=canaries,
        expected_batch=max(1, round(sample_rate * canaries)),
        steps=steps,
        clip_norm=CLIP_NORM,
    )
    release = calibrate([spec], epsilon=epsilon, delta=delta).main
    rate = torch.full((canaries,), spec.sample_rate, dtype=torch.float64)
    coins, scores = _play(settings, release, build, batches or (lambda step: rate))
    guesses, right, bound = best_bound(coins, scores, delta, confidence)
    return Audit(
        claimed=epsilon,
        delta=delta,
        bound=bound,
        confidence=confidence,
        canaries=canaries,
        guesses=guesses,
        right=right,
        steps=steps,
        noise_multiplier=release.noise_multiplier,
        sample_rate=spec.sample_rate,
        largest_refutable=largest_refutable(canaries, delta, confidence),
        seconds=time.monotonic() - begin,
    )


def _play(
    settings: AuditSettings, release: Release, build: Build, batches: Batches
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """The coins, and the adversary's scores: log-likelihood ratios of all results with and without each canary.

    Along a canary's own gradient a step's sum is noise, plus one clip norm if the canary is in the batch.
    """
    spec, randomness = release.spec, Randomness()
    count = spec.dataset_size
    schedule = Schedule.build(settings.schedule)
    network = Denoiser.build(settings, count).eval().requires_grad_(False)
    network.class_table.requires_grad_(True)
    x = randomness.normal(count * int(np.prod(settings.latent_shape))).view(count, *settings.latent_shape)
    eps = randomness.normal(x.numel()).view_as(x)
    # any values would do: each canary's timestep and noise are fixed, so its gradient is known
    t = (randomness.uniform(count) * schedule.timesteps).ceil().long()
    coins = randomness.uniform(count) <= 0.5

    def plain(indices: Tensor) -> Tensor:
        return noise_prediction_loss(network, schedule, x[indices], indices, t[indices], eps[indices])

    def losses(indices: Tensor) -> Tensor:
        # a canary that does not take part contributes nothing
        return plain(indices) * coins[indices]

    mechanism = build(release, network, losses, physical_batch=PIECE)
    table = network.class_table.weight
    scores = torch.zeros(count, dtype=torch.float64)
    with Progress("audit", spec.steps) as progress:
        for step in range(spec.steps):
            directions = torch.zeros_like(table)
            for piece in torch.arange(count).split(PIECE):
                directions += torch.autograd.grad(plain(piece).sum(), table)[0]
            directions = torch.nn.functional.normalize(directions, dim=1)[:count]
            (gradient,) = mechanism.gradient()
            along = (gradient[:count].double() * directions).sum(1) * spec.sample_rate * count / spec.sensitivity
            present = batches(step)
            likelihood = (along - 0.5) / release.noise_multiplier**2
            scores += torch.logaddexp(torch.log1p(-present), present.log() + likelihood)
            with torch.no_grad():
                table -= LEARNING_RATE * gradient
            progress.advance()
    return coins.numpy(), scores.numpy()
