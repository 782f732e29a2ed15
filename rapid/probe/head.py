"""Private training of the probe's linear layer, by the same mechanism as the denoiser."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import PrivateSettings
from rapid.data import ImageSet
from rapid.dp.ranks import Ranks
from rapid.dp.releases import Plan
from rapid.dp.training import MOMENTUM, train_private
from rapid.probe.features import probe_features
from rapid.probe.network import Probe

PHYSICAL_BATCH = 4096
EMA_DECAY = 0.9
HIGHEST_LEARNING_RATE = 1000.0
"""Where there is next to no noise. Clipped gradients of a linear layer on unit vectors bear such steps."""


def train_probe(
    public: Probe,
    images: ImageSet,
    plan: Plan,
    settings: PrivateSettings,
    device: torch.device,
    checkpoint: Path,
    ranks: Ranks,
) -> Probe:
    """Logistic regression on public features by DP gradient descent.

    Formal guarantee: that of `train_private`, on which it rests; features are a function of each image alone.

    Args:
        public: the probe of the public bundle; its trunk stays as it is.
        images: labelled private images of this rank.
        plan: what is spent.
        settings: `probe` and the noise source.
        device: where to train.
        checkpoint: file for the training state, of the first rank.
        ranks: the processes that share the work.

    Returns:
        A probe of the private classes.
    """
    assert images.labels is not None
    probe = public.with_classes(len(images.classes)).to(device).requires_grad_(False)
    probe.head.requires_grad_(True)
    features = probe_features(probe, images.images, device)
    labels = torch.from_numpy(images.labels).to(device)

    def losses(indices: Tensor) -> Tensor:
        indices = indices.to(device)
        return F.cross_entropy(probe.head(features[indices]), labels[indices], reduction="none")

    own = settings.model_copy(
        update={
            "optimizer": "momentum",
            "learning_rate": _learning_rate(plan, settings.probe.weight_noise),
            "ema_decay": EMA_DECAY,
            "physical_batch": PHYSICAL_BATCH,
            "precision": "float32",
        }
    )
    train_private(probe.head, losses, plan, own, checkpoint, ranks, title="probe")
    return probe.eval()


def _learning_rate(plan: Plan, weight_noise: float) -> float:
    """The rate at which the noise of all steps adds up to `weight_noise` in each weight, if it never fell.

    So less noise pays for larger steps. A step adds noise_multiplier * clip_norm / batch, times rate / (1 - momentum).
    """
    step = plan.noise_multiplier * plan.clip_norm / plan.expected_batch / (1 - MOMENTUM)
    total = step * math.sqrt(plan.steps)
    return min(HIGHEST_LEARNING_RATE, weight_noise / total) if total else HIGHEST_LEARNING_RATE
