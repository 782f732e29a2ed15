"""Sampling from a private GAN: one network call an image."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.config.sections import SamplingSettings
from rapid.nn.gan import GanGenerator
from rapid.runtime import place
from rapid.sampling.one_call import OneCallTrajectories
from rapid.sampling.streams import Streams, normal
from rapid.sampling.without_probe import WithoutProbe
from rapid.tones.curve import ToneCurve, stored_tones, toned

GENERATOR = "generator"


class DpGanSampler(WithoutProbe):
    """Samples with a trained generator: all of `DpGanGenerator` but the bundle.

    Args:
        network: trained.
        classes: names of the classes; empty for an unconditional model.
        device: where the network runs.
        settings: of generation.
        tones: the curve of generated images; None where none was fitted.

    Attributes:
        classes: as given.
        image_shape: (H, W) or (H, W, 3).
        latent_shape: (C, H, W): what `decode` gets are images in [-1, 1].
        batch_size: rows per network call when nothing else is served.
    """

    steps = max_steps = 1

    def __init__(
        self,
        network: GanGenerator,
        classes: tuple[str, ...],
        device: torch.device,
        settings: SamplingSettings,
        tones: ToneCurve | None = None,
    ) -> None:
        self.classes, self.batch_size = classes, settings.batch_size
        self._network = place(network, device)
        self._tones = None if tones is None else place(tones, device)
        self._device = device
        size, channels = network.config["size"], network.config["image_channels"]
        self.latent_shape: tuple[int, ...] = (channels, size, size)
        self.image_shape: tuple[int, ...] = (size, size) + ((channels,) if channels > 1 else ())

    def calls(self, steps: int | None = None) -> int:
        """Network calls of one image: 1."""
        return 1

    def trajectories(self) -> OneCallTrajectories:
        """Make an empty set of rows."""
        return OneCallTrajectories(self.sample)

    @torch.no_grad()
    def sample(self, streams: Streams, labels: NDArray[np.int64] | None) -> Tensor:
        """Images, float (n, C, H, W) in [-1, 1], of new noise streams and classes, int64 (n,) or None."""
        noise = torch.from_numpy(normal(streams, (self._network.config["latent"],)))
        own = np.zeros(len(streams), np.int64) if labels is None else labels
        latents, y = (part.to(self._device, non_blocking=True) for part in (noise, torch.from_numpy(own)))
        images: Tensor = self._network(latents, y)
        return images

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of images in [-1, 1], float (n, C, H, W)."""
        return toned(latents, self._tones)


class DpGanGenerator(DpGanSampler):
    """Images of the bundle's generator; implements `rapid.sampling.generator.Generator`.

    Args:
        bundle: a private bundle.
        device: where the network runs.
        settings: of generation.

    Attributes:
        bundle: as given.
    """

    def __init__(self, bundle: Bundle, device: torch.device, settings: SamplingSettings) -> None:
        network = bundle.component(GENERATOR, GanGenerator)
        super().__init__(network, bundle.classes, device, settings, stored_tones(bundle))
        self.bundle = bundle
