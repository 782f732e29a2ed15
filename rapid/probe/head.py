"""Private training of the probe's linear layer: one DP-SGD release of full batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.config.sections import PrivateProbeSettings
from rapid.data import to_unit_range
from rapid.dp.access import PrivateAccess
from rapid.dp.execution import Execution
from rapid.dp.objective import Objective
from rapid.dp.releases import DpSgdSpec, Release
from rapid.probe.network import COMPONENT, Probe
from rapid.training import Trainer
from rapid.training.optimizers import MOMENTUM, noisy_schedule

NAME = COMPONENT
PHYSICAL_BATCH = 4096
EMA_DECAY = 0.9
HIGHEST_LEARNING_RATE = 1000.0
"""Used where there is almost no noise. Clipped gradients of a linear layer on unit vectors tolerate such steps."""


def probe_spec(dataset_size: int, settings: PrivateProbeSettings) -> DpSgdSpec:
    """The release of the linear layer: all images in every step."""
    return DpSgdSpec(
        name=NAME,
        title="linear layer of the probe, which labels what is sampled",
        share=settings.share,
        dataset_size=dataset_size,
        expected_batch=dataset_size,
        steps=settings.steps,
        clip_norm=settings.clip_norm,
    )


def train_head(
    access: PrivateAccess,
    public: Probe,
    settings: PrivateProbeSettings,
    *,
    checkpoint_seconds: float = 60.0,
    noise_source: str = "chacha20",
) -> Probe:
    """Logistic regression on public features by DP gradient descent with momentum.

    Formal guarantee: one release of `access`; features are a function of each image alone.

    Args:
        access: its budget lists the release of `probe_spec`, its images are labelled.
        public: the probe of the public bundle; its trunk stays as it is.
        settings: how much noise the weights may get.
        checkpoint_seconds: how often the state is saved.
        noise_source: of the noise.

    Returns:
        A probe of the private classes, in evaluation mode.
    """
    device = access.device
    probe = public.with_classes(len(access.facts.classes)).to(device).requires_grad_(False)
    probe.head.requires_grad_(True)
    features = access.map(lambda images: probe.features(to_unit_range(images.numpy(), device)), access.images)
    labels = access.map(lambda numbers: numbers.to(device), access.labels)

    release = access.budget.release(NAME)
    rate = _learning_rate(release, settings.weight_noise)
    optimizer = torch.optim.SGD(probe.head.parameters(), lr=rate, momentum=MOMENTUM)
    scheduler = noisy_schedule(optimizer, release.spec.steps)
    access.train(
        NAME,
        Trainer(probe.head, optimizer, scheduler, ema_decay=EMA_DECAY),
        HeadLosses(probe.head),
        [features, labels],
        execution=Execution(PHYSICAL_BATCH, checkpoint_seconds=checkpoint_seconds, noise_source=noise_source),
    )
    return probe.eval()


class HeadLosses(Objective):
    """Cross-entropies of features.

    Args:
        head: the layer that is trained.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def prepare(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Features and labels, which are on the device."""
        return rows

    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses, float (n,)."""
        features, labels = prepared
        return F.cross_entropy(self._head(features), labels, reduction="none")


def _learning_rate(release: Release, weight_noise: float) -> float:
    """The rate at which, without decay, the noise of all steps adds up to `weight_noise` in each weight.

    So less noise allows larger steps. A step adds noise_stddev / batch, times rate / (1 - momentum).
    """
    step = release.noise_stddev / release.spec.dataset_size / (1 - MOMENTUM)
    total = step * math.sqrt(release.spec.steps)
    return min(HIGHEST_LEARNING_RATE, weight_noise / total) if total else HIGHEST_LEARNING_RATE
