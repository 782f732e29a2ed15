"""What an audit trains: the classifier of the bundle with the losses of the private stage, on random images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data.views import DRAWS
from rapid.dp.audit import Subject
from rapid.dp.randomness import Randomness
from rapid.methods.dp_classifier.private_stage import ViewLosses
from rapid.methods.dp_classifier.public_stage import CLASSIFIER
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.nn.wide_resnet import WideResNet
from rapid.training.optimizers import select_trainable

CANARIES = 16


def subjects(bundle: Bundle) -> Sequence[Subject]:
    """The classifier in float32 and in bfloat16; each canary has an image, a label and a view of its own.

    Public gradients (WarmExt) are no part of it: the mechanism does not see them.
    """
    settings = bundle.settings_as(DpClassifierSettings)
    own, form = settings.private, settings.image
    network = bundle.component(CLASSIFIER, WideResNet).eval()
    select_trainable(network, own.trainable)
    randomness, generator = Randomness(), torch.Generator().manual_seed(0)
    colours = (3,) if form.channels == 3 else ()
    images = torch.randint(0, 256, (CANARIES, form.size, form.size, *colours), dtype=torch.uint8, generator=generator)
    labels = torch.arange(CANARIES) % len(network.classes)
    draws = randomness.uniform(DRAWS * CANARIES).view(CANARIES, DRAWS)
    objective = ViewLosses(settings, network, randomness)

    def losses(indices: Tensor) -> Tensor:
        return objective.losses(images[indices], labels[indices], draws[indices])

    subject = Subject(
        "classifier", network, losses, CANARIES, own.clip_norm, own.multiplicity, physical_batch=own.draws_at_a_time
    )
    return [subject, subject.with_autocast()]
