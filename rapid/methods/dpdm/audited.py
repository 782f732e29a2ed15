"""What an audit trains, and scores for membership inference, both from the loss of the private stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import ImageSet, to_unit_range
from rapid.dp.audit import Subject
from rapid.dp.randomness import Randomness
from rapid.methods.dpdm.objective import DenoisingObjective, Draws
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.nn.preconditioned import PreconditionedDenoiser
from rapid.progress import Progress
from rapid.stopping import check_stop
from rapid.training.optimizers import select_trainable

CANARIES = 16
DRAWS = 16
"""Of level and noise, the same for all images."""
AT_ONCE = 250


def subjects(bundle: Bundle) -> Sequence[Subject]:
    """The denoiser in float32 and in bfloat16. Canaries are random images, each with its own draws and label."""
    settings = bundle.settings_as(DpdmSettings)
    own, denoiser = settings.private, bundle.component("denoiser", PreconditionedDenoiser)
    select_trainable(denoiser, own.trainable)
    objective = DenoisingObjective(denoiser, own.label_dropout, Randomness(), own.level_scale)
    shape = (CANARIES, *settings.image_shape)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = torch.arange(CANARIES) % (denoiser.num_classes + 1)
    draws = objective.draw(shape)

    def losses(indices: Tensor) -> Tensor:
        return objective.losses(images[indices], labels[indices], Draws(*(part[indices] for part in draws)))

    subject = Subject(
        "denoiser", denoiser, losses, CANARIES, own.clip_norm, own.multiplicity, physical_batch=own.draws_at_a_time
    )
    return [subject, subject.with_autocast()]


@torch.no_grad()
def membership_scores(bundle: Bundle, images: ImageSet, device: torch.device) -> Mapping[str, NDArray[np.float64]]:
    """Minus the mean loss with the image's label; see `rapid.methods.base.Inspectable`.

    Levels are spread evenly over those of training, and all images get the same noise, which takes its randomness out
    of the comparison.
    """
    denoiser = bundle.component("denoiser", PreconditionedDenoiser).to(device)
    settings = bundle.settings_as(DpdmSettings)
    objective = DenoisingObjective(denoiser, 0.0, Randomness(), settings.private.level_scale)
    levels = objective.levels((torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS)
    noise = torch.randn(DRAWS, *settings.image_shape, generator=torch.Generator().manual_seed(0)).to(device)
    found = np.zeros(len(images))
    with Progress("attack", DRAWS * len(images), "loss") as progress:
        for start in range(0, len(images), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(images)))
            x0 = to_unit_range(images.images[part], device)
            labels = denoiser.null_labels(len(x0))
            if images.labels is not None:
                labels = torch.from_numpy(images.labels[part]).to(device)
            for number in range(DRAWS):
                check_stop()
                dropped = torch.zeros(len(x0), dtype=torch.bool, device=device)
                draws = Draws(levels[number].to(device).expand(len(x0)), noise[number].expand_as(x0), dropped)
                found[part] -= objective.losses(x0, labels, draws).double().cpu().numpy() / DRAWS
                progress.advance(len(x0))
    return {"loss of the denoiser": found}
