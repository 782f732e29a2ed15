"""Scores for membership inference: how well the private denoiser fits an image.

The attacker has the bundle alone: it computes the loss of the private stage for an image, without augmentation, with
many draws of timestep and noise. The bundle has no public denoiser to compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import ImageSet, to_unit_range
from rapid.diffusion.losses import noise_prediction_loss
from rapid.diffusion.timesteps import TimestepMixture
from rapid.methods.dp_diffusion.networks import build_schedule, to_patches
from rapid.methods.dp_diffusion.public_stage import DENOISER
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser
from rapid.progress import Progress
from rapid.stopping import check_stop

DRAWS = 16
"""Of timestep and noise, the same for all images."""
AT_ONCE = 250


@torch.no_grad()
def membership_scores(bundle: Bundle, images: ImageSet, device: torch.device) -> Mapping[str, NDArray[np.float64]]:
    """Minus the mean loss; see `rapid.methods.base.Inspectable`.

    The timesteps are spread evenly over the mixture of the private stage.
    """
    settings = bundle.settings_as(DpDiffusionSettings)
    denoiser = bundle.component(DENOISER, Denoiser).to(device).eval()
    schedule = build_schedule(settings.schedule).to(device)
    own = settings.private.timesteps
    timesteps = TimestepMixture(own.weights, own.breaks).quantile((torch.arange(DRAWS).double() + 0.5) / DRAWS)
    noise = torch.randn(DRAWS, *settings.latent_shape, generator=torch.Generator().manual_seed(0)).to(device)
    losses = np.zeros(len(images))
    with Progress("attack", DRAWS * len(images), "loss") as progress:
        for start in range(0, len(images), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(images)))
            x = to_patches(to_unit_range(images.images[part], device), settings.denoiser.patch)
            count = len(x)
            labels = denoiser.null_labels(count)
            if images.labels is not None:
                labels = torch.from_numpy(images.labels[part]).to(device)
            for step, eps in zip(timesteps.tolist(), noise, strict=True):
                check_stop()
                t = torch.full((count,), step, device=device)
                found = noise_prediction_loss(denoiser, schedule, x, labels, t, eps.expand_as(x))
                losses[part] += found.double().cpu().numpy() / DRAWS
                progress.advance(count)
    return {"loss of the denoiser": -losses}
