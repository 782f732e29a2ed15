"""Scores for membership inference: how well the private denoiser fits an image.

The attacker has the whole bundle: it computes the loss of the private stage for an image, with many draws of timestep
and noise, and compares it with the loss of the public denoiser, which never saw private images. The latter takes
account of images that are easy for any denoiser (calibrated losses: Watson, Guo, Cormode, Sablayrolles 2022).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import ImageSet, to_unit_range
from rapid.diffusion import Schedule
from rapid.dp.randomness import Randomness
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.objectives import Draws, PrivateObjective, Retriever, uses_retrieval
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.progress import Progress
from rapid.stopping import check_stop

DRAWS = 16
"""Of timestep and noise, the same for all images."""
AT_ONCE = 250


@torch.no_grad()
def membership_scores(bundle: Bundle, images: ImageSet, device: torch.device) -> Mapping[str, NDArray[np.float64]]:
    """Minus the mean loss, and the public denoiser's mean loss minus it; see `rapid.methods.base.Inspectable`."""
    settings = bundle.settings_as(RapidSettings)
    private = bundle.component("denoiser", Denoiser).to(device).eval()
    public = bundle.component("public_denoiser", Denoiser).to(device).eval()
    retriever = _retriever(bundle, settings, public) if uses_retrieval(settings) else None
    # the randomness is not used: every image gets the same draws, which takes their noise out of the comparison
    objectives = [PrivateObjective(settings, network, retriever, Randomness()) for network in (private, public)]
    autoencoder = bundle.component("autoencoder", Autoencoder).to(device)
    draws = [_draw(objectives[0], settings, number, device) for number in range(DRAWS)]
    losses = np.zeros((2, len(images)))
    with Progress("attack", DRAWS * len(images), "loss") as progress:
        for start in range(0, len(images), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(images)))
            latents = autoencoder.encode(to_unit_range(images.images[part], device))
            count = len(latents)
            null = public.null_labels(count)
            own = private.null_labels(count)
            if images.labels is not None:
                own = torch.from_numpy(images.labels[part]).to(device)
            for draw in draws:
                check_stop()
                same = Draws(*(one.expand(count, *one.shape[1:]) for one in draw))
                for row, (objective, labels) in enumerate(zip(objectives, (own, null), strict=True)):
                    losses[row, part] += objective.losses(latents, labels, same).double().cpu().numpy() / DRAWS
                progress.advance(count)
    return {"loss of the denoiser": -losses[0], "loss against the public denoiser": losses[1] - losses[0]}


def _draw(objective: PrivateObjective, settings: RapidSettings, number: int, device: torch.device) -> Draws:
    """One draw: timesteps spread evenly over those that are trained; the label is kept."""
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(2, 1, *settings.latent_shape, generator=generator).to(device)
    last = objective.last_timestep
    t = torch.tensor([max(1, round((number + 0.5) / DRAWS * last))], device=device)
    dropped = torch.zeros(1, dtype=torch.bool, device=device)
    return Draws(t, noise[0], dropped, noise[1], torch.rand(1, generator=generator))


def _retriever(bundle: Bundle, settings: RapidSettings, public: Denoiser) -> Retriever:
    device = public.class_table.weight.device
    return Retriever(
        schedule=Schedule.build(settings.schedule).to(device),
        denoiser=public,
        encoder=bundle.component("encoder", TrajectoryEncoder).to(device),
        knowledge_base=open_knowledge_base(bundle),
        k=settings.retrieval.k,
        neighbours=settings.private.neighbours,
    )
