"""Select and distil: the denoiser trains on those of its own images that the probe is surest of.

Images are drawn, and of those that the private probe takes for the class that they were drawn for, the surest of each
class are kept. The denoiser then trains on them by the plain loss, without noise or clipping. Nothing here sees a
private image: all of it is post-processing of releases (denoiser, moments, probe, votes), and costs no privacy.

Before DP-SGD it teaches the denoiser what the probe and the moments know of the classes, so that the budget of DP-SGD
goes to likeness; after DP-SGD it cleans up. The last round can train classifier-free guidance in, so that images of a
class differ more from those of others, with as many network calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.data import to_unit_range
from rapid.data.augment import augment
from rapid.diffusion import Schedule
from rapid.diffusion.losses import guided_loss
from rapid.methods.rapid.candidates import Candidates, draw_candidates, surest
from rapid.methods.rapid.distillation_settings import When
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.votes import Votes
from rapid.nn import Autoencoder, Denoiser
from rapid.probe.features import probe_features
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.public import train

NAME = "distillation"
ENCODED = 500
"""Images encoded at a time."""


def distil(
    parts: Parts,
    device: torch.device,
    checkpoint: Callable[[str], Checkpoint],
    when: When = "after",
    *,
    candidates: Candidates | None = None,
    votes: Votes | None = None,
) -> Denoiser:
    """A copy of the denoiser, trained on its own images at all timesteps; the denoiser itself if none can be kept.

    Args:
        parts: of a private bundle with classes, in which the probe names the class of an image.
        device: where to train.
        checkpoint: of a training with the given name; the candidates of a run that was stopped are drawn again.
        when: before or after DP-SGD, which have their own numbers of rounds.
        candidates: of the first round, if they have been drawn.
        votes: for clusters of candidates; images are trained on as often as they say. None: all equally often.

    Raises:
        Stopped: a stop was requested.
    """
    own = parts.settings.private.distillation
    rounds = own.rounds_before if when == "before" else own.rounds
    for number in range(rounds):
        if candidates is None or number:
            candidates = draw_candidates(parts, device, number, when)
        accepted = float(candidates.accepted.mean())
        if accepted == 0 or accepted < own.least_accepted:
            problem = (
                f"the probe takes {accepted:.0%} of the images for their class: no more is distilled {when} DP-SGD"
            )
            warnings.warn(problem, stacklevel=2)
            break
        latents, labels, weights = chosen_latents(parts, candidates, votes, device, number)
        # denoisers of earlier rounds draw candidates, which lose variety by selection already
        guidance = own.guidance if (when, number) == ("after", rounds - 1) else 1.0
        denoiser = _trained(parts, latents, labels, weights, guidance, checkpoint(f"{NAME}-{when}-{number}"))
        parts = replace(parts, denoiser=denoiser, private_from=parts.settings.schedule.timesteps)
    return parts.denoiser


def _trained(
    parts: Parts,
    latents: Tensor,
    labels: NDArray[np.int64],
    weights: NDArray[np.float64],
    guidance: float,
    checkpoint: Checkpoint,
) -> Denoiser:
    """A copy of the denoiser, trained on latents of given classes, as often as their weights say; see `guided_loss`."""
    own, device = parts.settings.private.distillation, latents.device
    shares, targets = torch.from_numpy(weights), torch.from_numpy(labels).to(device)
    schedule = Schedule.build(parts.settings.schedule).to(device)
    denoiser = parts.denoiser.with_classes(len(parts.classes)).to(device).requires_grad_(True)
    denoiser.load_state_dict(parts.denoiser.state_dict())

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        count = own.training.batch_size
        drawn = (
            torch.multinomial(shares, count, replacement=True, generator=generator),
            torch.randint(1, schedule.timesteps + 1, (count,), generator=generator),
            torch.randn(count, *latents.shape[1:], generator=generator),
            torch.rand(count, generator=generator) < own.label_dropout,
        )
        # a copy waits for the step before
        picked, t, eps, dropped = (part.to(device) for part in drawn)
        y = torch.where(dropped, denoiser.num_classes, targets[picked])
        return latents[picked], y, t, eps

    def value(x: Tensor, y: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        return guided_loss(denoiser, schedule, x, y, denoiser.null_labels(len(x)), t, eps, guidance).mean()

    train(NAME, denoiser, Loss(draw, value), own.training, checkpoint)
    return denoiser


@torch.no_grad()
def chosen_latents(
    parts: Parts, candidates: Candidates, votes: Votes | None, device: torch.device, seed: int
) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float64]]:
    """Latents of the kept images and of random views of them, their classes, and how often each is trained on.

    Args:
        parts: see `distil`.
        candidates: what may be kept.
        votes: see `distil`.
        device: where to compute.
        seed: of the views.

    Returns:
        Latents, float (n, c, h, w); classes, int64 (n,); weights, float64 (n,), with the same sum in each class.
    """
    own = parts.settings.private.distillation
    rows, labels = surest(candidates.probabilities, candidates.wanted, own.keep)
    weights = np.ones(len(rows))
    if votes is not None:
        assert parts.probe is not None
        # the density of candidates is that of all that the probe accepts, of which `keep` takes a part
        taken = np.flatnonzero(candidates.accepted)
        features = probe_features(parts.probe.to(device), candidates.images[taken], device).cpu()
        weights = votes.weights(features, candidates.wanted[taken])[np.searchsorted(taken, rows)]
    totals = np.bincount(labels, weights, len(parts.classes))[labels]
    # where a class got no votes above the noise, all of it equally often
    weights = np.where(totals > 0, weights / np.where(totals > 0, totals, 1), 1 / np.bincount(labels)[labels])
    autoencoder = parts.autoencoder.to(device)
    pixels = to_unit_range(candidates.images[rows], device)
    latents = [_encoded(autoencoder, pixels)]
    generator = torch.Generator().manual_seed(seed)
    latents += [_encoded(autoencoder, augment(pixels, own.augment, generator)) for _ in range(own.views)]
    return torch.cat(latents), np.tile(labels, 1 + own.views), np.tile(weights, 1 + own.views)


def _encoded(autoencoder: Autoencoder, pixels: Tensor) -> Tensor:
    return torch.cat([autoencoder.encode(part) for part in pixels.split(ENCODED)])
