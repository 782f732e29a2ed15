"""Classifier guidance: the private probe pulls images towards their class while they are sampled.

Formal guarantee: probe and moments are results of releases, so this is post-processing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid.diffusion import Schedule
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.nn import Autoencoder
from rapid.nn.storage import StoredNetwork
from rapid.probe.network import Probe

NAME = "guidance"
"""Of its levels in a bundle."""
REACH = 0.65
"""Root mean square of a move, in standard deviations of x_0 given x_t. Letters were best at 0.5 to 0.75, classes of
CIFAR-100 at 0.6 to 0.9."""
RAMP = 0.25
"""Over this last part of the way to the limit, moves shrink to 0."""
ROUGHNESS = 0.3
"""Standard deviation of noise on the images that the probe sees, which lie in [-1, 1]. Without noise and shifts images
gain patterns that please the probe and nobody else."""
SHIFT = 2
"""Most pixels by which these images are moved along each axis."""
TINY = 1e-20
"""Least square of a length: a gradient of 0 moves nothing."""
VIEWS = 67
"""Different shifts and patterns of noise. Of 1,000 timesteps in equal steps no two successive ones get the same."""


class GuidanceLevels(StoredNetwork):
    """The probability of its class up to which an image is guided, if `generation.probe_guidance` says no less.

    Args:
        config: JSON-ready: classes; confidence (1 where it is missing: bundles of earlier versions).

    Attributes:
        limits: probabilities, float (classes,); 0: no guidance, 1: as the setting says.
        confidence: probability that a candidate needs to be accepted, if `generation.confidence` says no less.
    """

    limits: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.confidence: float = config.get("confidence", 1.0)
        self.register_buffer("limits", torch.zeros(config["classes"]))


def class_limits(levels: GuidanceLevels | None, classes: int, most: float) -> Tensor:
    """The limit of each class, float (classes,) on the CPU: that of the levels if there are any, none above `most`."""
    return torch.full((classes,), most) if levels is None else levels.limits.cpu().clamp_max(most)


def least_confidence(levels: GuidanceLevels | None, own: GenerationSettings) -> float:
    """The probability that a candidate needs: that of the levels if they are wanted, not above the setting."""
    if levels is None or not own.least_accepted:
        return own.confidence
    return min(own.confidence, levels.confidence)


class PosteriorCovariance:
    """The covariance C of x_0 given x_t, for latents x_0 that follow the moments of their class.

    For x_t = a x_0 + b eps and x_0 ~ N(m, S) it is C = b^2 S (a^2 S + b^2)^-1.

    Args:
        moments: None: S is the identity, as for normalised latents at large.
        schedule: on the device.
    """

    def __init__(self, moments: ClassMoments | None, schedule: Schedule) -> None:
        self._moments, self._schedule = moments, schedule
        if moments is not None:
            self._values, self._vectors = (part.to(moments.basis.device) for part in moments.spectra())

    def times(self, directions: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """C times directions, float (n, c, h, w), at timesteps t (n,) for classes, int64 (n,)."""
        a, b = self._schedule.signal(t).square(), self._schedule.noise(t).square()
        if self._moments is None:
            return b / (a + b) * directions
        own = labels if len(self._values) > 1 else torch.zeros_like(labels)
        inside, outside = self._moments.split(directions)
        variances = b.flatten(1) * self._values[own] / (a.flatten(1) * self._values[own] + b.flatten(1))
        turned = torch.einsum("nij,ni->nj", self._vectors[own], inside) * variances
        coordinates = torch.einsum("nij,nj->ni", self._vectors[own], turned)
        rest = self._moments.outside_deviation().square().view(-1, 1, 1)
        return b * rest / (a * rest + b) * outside + self._moments.latents(coordinates)


class ProbeGuidance:
    """Moves denoised latents to where the probe finds their classes more likely, until it is confident.

    Classifier guidance (Dhariwal and Nichol, 2021) with a classifier of clean images. The score of log p(label | x_t)
    is that of log p(label | x_0) at the denoised x_0, through the covariance C of x_0 given x_t, so x_0 moves along
    C * gradient. With the moments of the classes C is that of their Gaussians, which keeps images away from where no
    private ones are; without them, that of standard normal latents.

    No scale says how far, because one that suits a probe is too large for another: every move is `REACH` long. Over
    the last part of the way to the limit of its class (`RAMP`) it shrinks to 0. Beyond it images would become
    caricatures.

    Each row is treated for itself. What the probe sees follows from the timestep, so a seed keeps its images.

    Args:
        probe: knows the classes; on the device.
        autoencoder: on the device.
        schedule: on the device.
        moments: of the classes, if there are any.
        limits: these probabilities by class, in [0, 1), float (classes,); 0: no guidance.
    """

    def __init__(
        self,
        probe: Probe,
        autoencoder: Autoencoder,
        schedule: Schedule,
        moments: ClassMoments | None,
        limits: Tensor,
    ) -> None:
        self._probe, self._autoencoder = probe, autoencoder
        device = probe.mean.device
        self._limits = limits.to(device)
        shape = probe.config["image_channels"], probe.config["image_size"], probe.config["image_size"]
        generator = torch.Generator().manual_seed(0)
        self._patterns = (ROUGHNESS * torch.randn(VIEWS, *shape, generator=generator)).to(device)
        shifts = torch.randint(-SHIFT, SHIFT + 1, (VIEWS, 2, 1), generator=generator)
        self._places = ((torch.arange(shape[-1]) + shifts) % shape[-1]).to(device)
        self._covariance = PosteriorCovariance(None if moments is None else moments.to(device), schedule)

    def towards(self, x0: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Latents x_0, float (n, c, h, w), denoised at timesteps t (n,), moved towards labels, int64 (n,)."""
        limits = self._limits[labels]
        if x0.device.type != "cpu":
            # to look for the rows that are guided would make the host wait
            return self._moved(x0, t, labels, limits)
        rows = limits.nonzero()[:, 0]
        moved = x0.clone()
        if len(rows):
            moved[rows] = self._moved(x0[rows], t[rows], labels[rows], limits[rows])
        return moved

    def _moved(self, x0: Tensor, t: Tensor, labels: Tensor, limits: Tensor) -> Tensor:
        """`towards` for rows of which some or all are guided."""
        gradient, probability = self._gradient(x0, t, labels)
        move = self._covariance.times(gradient, t, labels)
        # its length in standard deviations: move^T C^-1 move = move^T gradient
        length = ((move * gradient).flatten(1).mean(1)).clamp_min(TINY).sqrt()
        wanted = REACH * ((1 - probability / limits.clamp_min(TINY)) / RAMP).clamp(0, 1) * (limits > 0)
        return x0 + (wanted / length).view(-1, 1, 1, 1) * move

    def _gradient(self, x0: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Of log p(label | x_0) by the latents, and p, float (n,)."""
        with torch.enable_grad():
            latents = x0.detach().requires_grad_()
            images = self._autoencoder.decode_raw(self._autoencoder.unnormalised(latents))
            likelihood = self._probe(self._view(images, t)).log_softmax(1).gather(1, labels[:, None])[:, 0]
            (gradient,) = torch.autograd.grad(likelihood.sum(), latents)
        return gradient, likelihood.detach().exp()

    def _view(self, images: Tensor, t: Tensor) -> Tensor:
        """Images, float (n, C, H, W), moved, with what leaves at one edge entering at the other, and with noise."""
        view = t % VIEWS
        rows, columns = (part[:, None] for part in self._places[view].unbind(1))
        channels = torch.arange(images.shape[1], device=images.device)[:, None, None]
        everyone = torch.arange(len(images), device=images.device)[:, None, None, None]
        moved = images[everyone, channels, rows[..., None], columns[..., None, :]]
        return moved + self._patterns[view]
