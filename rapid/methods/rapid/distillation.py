"""Select and distil: the denoiser trains on those of its own images that the probe is surest of.

Images are drawn, and of those that the private probe takes for the class that they were drawn for, the surest of each
class are kept. The denoiser then trains on them by the plain loss, without noise or clipping. Nothing here sees a
private image: all of it is post-processing of the denoiser, the moments and the probe, and costs no privacy.

Before DP-SGD it teaches the denoiser what the probe and the moments know of the classes, so that the budget of DP-SGD
goes to likeness; after DP-SGD it cleans up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.data import to_unit_range
from rapid.data.augment import augment
from rapid.diffusion import Schedule
from rapid.diffusion.losses import noise_prediction_loss
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import When
from rapid.nn import Autoencoder, Denoiser
from rapid.progress import Progress
from rapid.sampling.streams import make_streams
from rapid.stopping import check_stop
from rapid.training import Checkpoint
from rapid.training.public import train

NAME = "distillation"
ENCODED = 500
"""Images encoded at a time."""


def distil(
    parts: Parts, device: torch.device, checkpoint: Callable[[str], Checkpoint], when: When = "after"
) -> Denoiser:
    """A copy of the denoiser, trained on its own images at all timesteps; the denoiser itself if none can be kept.

    Args:
        parts: of a private bundle with classes, in which the probe names the class of an image.
        device: where to train.
        checkpoint: of a training with the given name; the candidates of a run that was stopped are drawn again.
        when: before or after DP-SGD, which have their own numbers of rounds.

    Raises:
        Stopped: a stop was requested.
    """
    own = parts.settings.private.distillation
    for number in range(own.rounds_before if when == "before" else own.rounds):
        latents, labels = chosen_latents(parts, device, number, when)
        if not len(labels):
            warnings.warn("the probe takes no image for its class: nothing is distilled", stacklevel=2)
            break
        denoiser = _trained(parts, latents, labels, checkpoint(f"{NAME}-{when}-{number}"))
        parts = replace(parts, denoiser=denoiser, private_from=parts.settings.schedule.timesteps)
    return parts.denoiser


def _trained(parts: Parts, latents: Tensor, labels: NDArray[np.int64], checkpoint: Checkpoint) -> Denoiser:
    """A copy of the denoiser, trained on latents of given classes."""
    own, device = parts.settings.private.distillation, latents.device
    # all classes equally often, however many images of each were kept
    weights = torch.from_numpy(1 / np.bincount(labels)[labels])
    targets = torch.from_numpy(labels).to(device)
    schedule = Schedule.build(parts.settings.schedule).to(device)
    denoiser = parts.denoiser.with_classes(len(parts.classes)).to(device).requires_grad_(True)
    denoiser.load_state_dict(parts.denoiser.state_dict())

    def loss(generator: torch.Generator) -> Tensor:
        count = own.training.batch_size
        picked = torch.multinomial(weights, count, replacement=True, generator=generator).to(device)
        t = torch.randint(1, schedule.timesteps + 1, (count,), generator=generator).to(device)
        eps = torch.randn(count, *latents.shape[1:], generator=generator).to(device)
        dropped = torch.rand(count, generator=generator).to(device) < own.label_dropout
        y = torch.where(dropped, denoiser.num_classes, targets[picked])
        return noise_prediction_loss(denoiser, schedule, latents[picked], y, t, eps).mean()

    train(NAME, denoiser, loss, own.training, checkpoint)
    return denoiser


@torch.no_grad()
def chosen_latents(
    parts: Parts, device: torch.device, number: int = 0, when: When = "after"
) -> tuple[Tensor, NDArray[np.int64]]:
    """Latents of the kept images and of random views of them, float (n, c, h, w), and their classes, int64 (n,).

    Args:
        parts: see `distil`.
        device: where to compute.
        number: of the round; the first draws as `distillation.sampling` says, later ones as images are drawn.
        when: before or after DP-SGD; their seeds differ.
    """
    own = parts.settings.private.distillation
    assert parts.probe is not None
    probe, autoencoder = parts.probe.to(device), parts.autoencoder.to(device)
    generation = parts.settings.generation
    sampler = RapidSampler(parts, device, generation if number else own.sampling or generation)
    seed = number + (own.rounds if when == "before" else 0)
    images, probabilities = [], []
    with Progress("candidates", own.candidates, "image") as progress:
        for numbers in _portions(own.candidates, sampler.batch_size):
            check_stop()
            drawn = sampler.decode(sampler.sample(make_streams(seed, numbers), numbers % len(parts.classes))[1])
            images.append(drawn)
            probabilities.append(probe.probabilities(to_unit_range(drawn, device)).cpu().numpy())
            progress.advance(len(numbers))
    wanted = np.arange(own.candidates) % len(parts.classes)
    kept, labels = surest(np.concatenate(probabilities), wanted, own.keep)
    pixels = to_unit_range(np.concatenate(images)[kept], device)
    latents = [_encoded(autoencoder, pixels)]
    generator = torch.Generator().manual_seed(seed)
    latents += [_encoded(autoencoder, augment(pixels, own.augment, generator)) for _ in range(own.views)]
    return torch.cat(latents), np.tile(labels, 1 + own.views)


def surest(
    probabilities: NDArray[np.float32], wanted: NDArray[np.int64], keep: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the images that the probe takes for the class that they were drawn for, the surest of each class.

    Args:
        probabilities: float32 (n, classes).
        wanted: classes that the images were drawn for, int64 (n,).
        keep: share of such images of each class that is kept; at least one where there is any.

    Returns:
        Rows, int64 (m,), and their classes, int64 (m,).
    """
    labels, sure = probabilities.argmax(1), probabilities.max(1)
    rows = []
    for number in range(probabilities.shape[1]):
        own = np.flatnonzero((labels == number) & (wanted == number))
        order = own[np.argsort(-sure[own], kind="stable")]
        rows.append(order[: max(1, round(keep * len(order)))])
    chosen = np.concatenate(rows)
    return chosen, labels[chosen].astype(np.int64)


def _portions(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    return (np.arange(start, min(start + size, count)) for start in range(0, count, size))


def _encoded(autoencoder: Autoencoder, pixels: Tensor) -> Tensor:
    return torch.cat([autoencoder.encode(part) for part in pixels.split(ENCODED)])
