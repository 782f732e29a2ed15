"""DP diffusion's public stage: a pixel diffusion on public images, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from rapid.bundle import Thumbnails
from rapid.bundle.builder import BundleBuilder
from rapid.data.thumbnails import thumbnails
from rapid.methods.base import Description, PublicImages
from rapid.methods.dp_diffusion.networks import PixelDenoiserRecipe, train_denoiser
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser

DENOISER, THUMBNAILS = "denoiser", "thumbnails"


def train_public(builder: BundleBuilder, public: PublicImages, settings: DpDiffusionSettings) -> Description:
    """Train the denoiser; one that an earlier run has finished is not trained again.

    Args:
        builder: collects the components.
        public: the public images; all of them are drawn alike.
        settings: the public sections are used.

    Raises:
        Stopped: a stop was requested; the state is saved.
    """
    s, images = settings, public.images
    classes = len(images.classes) if s.denoiser.conditional and images.labels is not None else 0
    labels = np.zeros(len(images), np.int64) if not classes or images.labels is None else images.labels
    recipe = PixelDenoiserRecipe(
        images=builder.images,
        views=s.views,
        schedule=s.schedule,
        timesteps=s.timesteps,
        denoiser=s.denoiser,
        latent_shape=s.latent_shape,
    )
    denoiser = builder.make(
        DENOISER,
        Denoiser,
        recipe,
        lambda state: train_denoiser(recipe, images.images, labels, classes, builder.device, state, builder.ranks),
    )
    builder.add(THUMBNAILS, Thumbnails(thumbnails(images.images)))
    trained = len(images) if s.denoiser.pretrained else 0
    words = f"of {classes} classes" if classes else "without classes"
    about = (
        f"A diffusion model of pixels {words}, {'trained on all public images' if trained else 'not trained'}. "
        "`thumbnails/` holds a grey\nthumbnail of each image, by which `train-private` sees that no private images are "
        "among them.\n"
    )
    told = bundle_facts(settings) | {"parameters": sum(p.numel() for p in denoiser.parameters())}
    return Description(about, told, trained, len(images) - trained)


def bundle_facts(settings: DpDiffusionSettings) -> dict[str, Any]:
    """Facts that `rapid info` shows of any bundle of the method."""
    return {"timesteps": settings.schedule.timesteps, "patch": settings.denoiser.patch}
