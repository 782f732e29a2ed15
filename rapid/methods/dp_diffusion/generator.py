"""DP diffusion's generator: from noise to pixels by the denoiser alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.bundle.format import Kind
from rapid.diffusion.solvers import Solver, late_grid
from rapid.errors import InputError
from rapid.methods.dp_diffusion.networks import build_schedule, from_patches
from rapid.methods.dp_diffusion.public_stage import DENOISER
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings, PixelSamplingSettings
from rapid.nn import Denoiser
from rapid.nn.denoiser import guided
from rapid.runtime import place
from rapid.sampling.linear_trajectories import Entry, LinearTrajectories, Phase, Route
from rapid.sampling.streams import Streams, normal
from rapid.sampling.without_probe import WithoutProbe
from rapid.tones.curve import ToneCurve, stored_tones, toned


def check_guidance(own: DpDiffusionSettings, kind: Kind, classes: Sequence[str], guidance: float) -> None:
    """Check that guidance has both a class and the null class to compare.

    Args:
        own: settings of the training.
        kind: of the training.
        classes: that the network knows.
        guidance: the scale.

    Raises:
        InputError: guidance of a model that has no classes, or was never trained with the null class.
    """
    dropout = own.denoiser.label_dropout * own.denoiser.pretrained
    if kind == "private":
        dropout = max(dropout, own.private.label_dropout)
    if guidance != 1 and not (classes and dropout):
        problem = "needs a model with classes, trained with label_dropout above 0; use 1"
        raise InputError("generation.guidance", problem, guidance)


class PixelSampler(WithoutProbe):
    """Samples with a trained denoiser: all of `PixelGenerator` but the bundle.

    Args:
        denoiser: trained.
        own: settings of the training.
        kind: of the training.
        classes: names of the classes of the images; empty if they have no labels.
        device: where the network runs.
        settings: of generation.
        tones: the curve of generated images; None where none was fitted.

    Attributes:
        classes: as given; empty for a network that was not told the classes of the public images.
        image_shape: (H, W) or (H, W, 3).
        latent_shape: (C, H, W) of an image with its patches as channels.
        device: as given.
        settings: as given.

    Raises:
        InputError: guidance of a model that has no classes, or was never trained with the null class.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        own: DpDiffusionSettings,
        kind: Kind,
        classes: tuple[str, ...],
        device: torch.device,
        settings: PixelSamplingSettings,
        tones: ToneCurve | None = None,
    ) -> None:
        self.device, self.settings, self.image_shape = device, settings, own.image.shape
        self.latent_shape: tuple[int, ...] = own.latent_shape
        self._patch = own.denoiser.patch
        self._denoiser = place(denoiser, device)
        self._tones = None if tones is None else place(tones, device)
        self.classes: tuple[str, ...] = classes if self._denoiser.num_classes else ()
        check_guidance(own, kind, self.classes, settings.guidance)
        self._schedule = build_schedule(own.schedule).to(device)
        self._routes: dict[int, Route] = {}

    @property
    def steps(self) -> int:
        """Network calls of an image whose request names none, except for rounding."""
        return self.settings.steps

    @property
    def max_steps(self) -> int:
        """T."""
        return self._schedule.timesteps

    @property
    def batch_size(self) -> int:
        """Rows per network call when nothing else is served."""
        return self.settings.batch_size

    def calls(self, steps: int | None = None) -> int:
        """Network calls of one image; with guidance each is for two images."""
        return sum(len(phase.networks) for phase in self.route(steps))

    def trajectories(self) -> LinearTrajectories:
        """Make an empty set of rows."""
        return LinearTrajectories(self)

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of pixels in patches, float (n, c, h, w)."""
        return toned(from_patches(latents, self._patch), self._tones)

    def route(self, steps: int | None = None) -> Route:
        """The network calls of an image: timesteps T // steps apart, from T."""
        stride = max(1, self.max_steps // (steps or self.settings.steps))
        if stride not in self._routes:
            grid = late_grid(self.max_steps, stride)
            solver = Solver.build(self.settings.sampler, self._schedule, grid, stride)
            self._routes[stride] = (Phase(solver, (DENOISER,) * len(solver.timesteps)),)
        return self._routes[stride]

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        """Noise; see `LinearModel`."""
        return Entry(torch.from_numpy(normal(streams, self.latent_shape)).to(self.device, non_blocking=True))

    @torch.no_grad()
    def predict(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """The noise in x_t; see `LinearModel`."""
        y = self._denoiser.null_labels(len(x)) if labels is None else labels
        noise = guided(self._denoiser, x, t, y, self.settings.guidance)
        return self._schedule.clipped_noise(x, noise, t, self.settings.clip_range)


class PixelGenerator(PixelSampler):
    """Samples from a public or private bundle; implements `rapid.sampling.generator.Generator`.

    Args:
        bundle: a public or a private bundle.
        device: where the network runs.
        settings: of generation; default: the bundle's own.

    Attributes:
        bundle: as given.
    """

    def __init__(self, bundle: Bundle, device: torch.device, settings: PixelSamplingSettings | None = None) -> None:
        own = bundle.settings_as(DpDiffusionSettings)
        denoiser, kind = bundle.component(DENOISER, Denoiser), bundle.config.kind
        super().__init__(denoiser, own, kind, bundle.classes, device, settings or own.generation, stored_tones(bundle))
        self.bundle = bundle
