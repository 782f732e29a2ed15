"""DPDM's public stage: an EDM of public images alone, which makes more of a few (Park, Choi, Lee 2024)."""

from __future__ import annotations

import numpy as np

from rapid.bundle.builder import BundleBuilder
from rapid.methods.base import Description, PublicImages
from rapid.methods.dpdm.networks import DENOISER, AmplifierRecipe, train_denoiser
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.nn.preconditioned import PreconditionedDenoiser


def train_public(builder: BundleBuilder, public: PublicImages, settings: DpdmSettings) -> Description:
    """Train the denoiser; one that an earlier run has finished is not trained again.

    Args:
        builder: collects the components.
        public: the public images; all of them are drawn alike.
        settings: the public sections are used.

    Raises:
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    images = public.images
    classes = 0 if images.labels is None else len(images.classes)
    labels = np.zeros(len(images), np.int64) if images.labels is None else images.labels
    recipe = AmplifierRecipe(
        images=builder.images,
        denoiser=settings.denoiser,
        latent_shape=settings.latent_shape,
        patch=settings.network.patch,
        public=settings.public,
    )
    denoiser = builder.make(
        DENOISER,
        PreconditionedDenoiser,
        recipe,
        lambda state: train_denoiser(recipe, images.images, labels, classes, builder.device, state, builder.ranks),
    )
    about = (
        f"An EDM of pixels {f'of {classes} classes' if classes else 'without classes'}, trained on the public images "
        "alone. `rapid generate` makes more\nimages of their kind. It is no base of `rapid train-private`.\n"
    )
    facts = {
        "configuration": "edm",
        "sigma_data": settings.public.sigma_data,
        "parameters": sum(p.numel() for p in denoiser.parameters()),
    }
    return Description(about, facts, pre_training=len(images))
