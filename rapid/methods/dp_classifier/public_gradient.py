"""WarmExt: the gradient of public images beside the private one, in every private step.

The step uses (1 - a) * private + a * public, as in Amid et al.: Public Data-Assisted Mirror Descent for Private Model
Training (ICML 2022), who mix the two linearly; the paper on amplified public data compares itself with this. It is
post-processing: the private gradient has its noise before it is mixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.data import to_unit_range
from rapid.data.views import DRAWS, random_views
from rapid.methods.dp_classifier.images import LabelledImages
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.nn.wide_resnet import WideResNet


class PublicGradient:
    """Gradients of random public batches, clipped to the norm to which private ones are clipped.

    Public classes that the private set does not have are left out. A gradient that is not finite counts as zero, so
    that it cannot spoil the weights.

    Args:
        public: the images.
        network: that is trained; its parameters that require gradients now.
        settings: batch, views, weight.
    """

    def __init__(self, public: LabelledImages, network: WideResNet, settings: DpClassifierSettings) -> None:
        place = {name: number for number, name in enumerate(network.classes)}
        known = np.array([name in place for name in public.labels], np.bool_)
        self._images = public.images[known]
        self._labels = torch.tensor([place[name] for name in public.labels if name in place], dtype=torch.int64)
        self._network = network
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._own = settings.private

    def mix_in(self, step: int) -> None:
        """Mix the public gradients of a step into `.grad`, which has the private ones with their noise.

        Args:
            step: number of steps so far; it seeds the public batch, so that all ranks draw the same.
        """
        for parameter, public in zip(self._parameters, self.at(step), strict=True):
            assert parameter.grad is not None
            parameter.grad.lerp_(public, self._own.public_share)

    def at(self, step: int) -> Sequence[Tensor]:
        """The clipped gradients of the batch of a step, one for each trained parameter."""
        zeros = [torch.zeros_like(p) for p in self._parameters]
        if not len(self._labels):
            return zeros
        generator = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(self._labels), (self._own.public_batch,), generator=generator)
        device = self._parameters[0].device
        draws = torch.rand(len(chosen), DRAWS, generator=generator).to(device)
        with torch.enable_grad():
            views = random_views(to_unit_range(self._images[chosen.numpy()], device), draws, self._own.views)
            loss = F.cross_entropy(self._network(views), self._labels[chosen].to(device))
            gradients = torch.autograd.grad(loss, self._parameters)
        norm = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).norm()
        if not torch.isfinite(norm):
            return zeros
        scale = (self._own.clip_norm / norm.clamp_min(self._own.clip_norm)).item()
        return [g * scale for g in gradients]
