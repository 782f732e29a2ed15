"""DPDM's generator: from noise to images by the private denoiser (see `rapid.sampling.generator` for the protocol)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.diffusion.samplers import Churn, Path
from rapid.errors import InputError
from rapid.methods.dpdm.networks import CHOSEN_FOR, DENOISER
from rapid.methods.dpdm.settings import MAX_STEPS, DpdmGenerationSettings, DpdmSettings
from rapid.methods.dpdm.tuned import Tuned, tuned_for
from rapid.nn.denoiser import guided
from rapid.nn.preconditioned import PreconditionedDenoiser
from rapid.runtime import place
from rapid.sampling.linear_trajectories import Entry, LinearTrajectories, Phase, Route
from rapid.sampling.streams import Streams, normal
from rapid.sampling.without_probe import WithoutProbe
from rapid.tones.curve import ToneCurve, stored_tones, toned


def can_guide(own: DpdmSettings, classes: Sequence[str], settings: DpdmGenerationSettings, *, private: bool) -> bool:
    """Whether a model has both a class and the null class, which guidance compares.

    Args:
        own: settings of the training.
        classes: that the network knows.
        settings: of generation.
        private: whether the training was.

    Raises:
        InputError: it has not, and guidance is set.
    """
    dropout = own.private.label_dropout if private else own.public.label_dropout
    if classes and dropout:
        return True
    if settings.guidance:
        raise InputError("generation.guidance", "needs a model with classes and label dropout", settings.guidance)
    return False


class DpdmSampler(WithoutProbe):
    """Samples with a trained denoiser: all of `DpdmGenerator` but the bundle.

    Args:
        denoiser: trained.
        own: settings of the training.
        classes: names of the classes; empty for an unconditional model.
        epsilon: of the training, by which the paper chose settings; None for a public denoiser.
        device: where the network runs.
        settings: of generation.
        tones: the curve of generated images; None where none was fitted.

    Attributes:
        classes: as given.
        image_shape: (H, W) or (H, W, 3).
        latent_shape: (C, H, W).
        device: as given.
        tuned: guidance and churn, with the values that the settings leave open.

    Raises:
        InputError: guidance of a model without classes, or without label dropout.
    """

    max_steps = MAX_STEPS

    def __init__(
        self,
        denoiser: PreconditionedDenoiser,
        own: DpdmSettings,
        classes: tuple[str, ...],
        epsilon: float | None,
        device: torch.device,
        settings: DpdmGenerationSettings,
        tones: ToneCurve | None = None,
    ) -> None:
        self.classes, self.image_shape = classes, own.image.shape
        self.latent_shape: tuple[int, ...] = own.image_shape
        self.device = device
        self._settings = settings
        self._denoiser = place(denoiser, device)
        self._tones = None if tones is None else place(tones, device)
        self.tuned = _chosen(settings, epsilon)
        if not can_guide(own, classes, settings, private=epsilon is not None):
            self.tuned = Tuned(0.0, self.tuned.churn)
        self._routes: dict[int, Route] = {}

    @property
    def steps(self) -> int:
        """Noise levels of a request that names none."""
        return self._settings.steps

    @property
    def batch_size(self) -> int:
        """Rows per network call when nothing else is served."""
        return self._settings.batch_size

    def route(self, steps: int | None = None) -> Route:
        """The network calls of an image: one phase."""
        count = steps or self.steps
        if count not in self._routes:
            path = Path.build(self._settings.sampler, count, self.tuned.churn, self._settings.last_level)
            self._routes[count] = (Phase(path, (DENOISER,) * len(path)),)
        return self._routes[count]

    def calls(self, steps: int | None = None) -> int:
        """Network calls of one image; with guidance each is for two images."""
        return sum(len(phase.networks) for phase in self.route(steps))

    def trajectories(self) -> LinearTrajectories:
        """Make an empty set of rows."""
        return LinearTrajectories(self)

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        """Noise; see `LinearModel`."""
        return Entry(torch.from_numpy(normal(streams, self.latent_shape)).to(self.device, non_blocking=True))

    @torch.no_grad()
    def predict(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """D(x; sigma, label) at sigma = t, with guidance; see `LinearModel`.

        DPDM prints weights w and 1 - w; its code, and the tables of its best settings, mean 1 + w and w.
        """
        y = self._denoiser.null_labels(len(x)) if labels is None else labels
        return guided(self._denoiser, x, t, y, 1 + self.tuned.guidance)

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of pixels in [-1, 1], float (n, C, H, W)."""
        return toned(latents, self._tones)


class DpdmGenerator(DpdmSampler):
    """Samples from a DPDM bundle; implements `rapid.sampling.generator.Generator`.

    Args:
        bundle: private, or public.
        device: where the network runs.
        settings: of generation.

    Attributes:
        bundle: as given.
    """

    def __init__(self, bundle: Bundle, device: torch.device, settings: DpdmGenerationSettings) -> None:
        super().__init__(
            bundle.component(DENOISER, PreconditionedDenoiser),
            bundle.settings_as(DpdmSettings),
            bundle.classes,
            _chosen_for(bundle),
            device,
            settings,
            stored_tones(bundle),
        )
        self.bundle = bundle


def _chosen_for(bundle: Bundle) -> float | None:
    """The epsilon that guidance and churn are chosen by, as the configuration was; None if the bundle is public."""
    if bundle.privacy is None:
        return None
    # bundles of before 0.3 do not say it
    spent = bundle.privacy.get("selection", {}).get("epsilon_of_one_trial", bundle.privacy["epsilon"])
    return float(bundle.config.facts.get(CHOSEN_FOR, spent))


def _chosen(settings: DpdmGenerationSettings, epsilon: float | None) -> Tuned:
    """Guidance and churn of the settings, where they are given, or else the paper's for this epsilon.

    A public denoiser, without epsilon, has neither: as in EDM.
    """
    best = Tuned(0.0, Churn()) if epsilon is None else tuned_for(settings.aim, settings.data, epsilon)

    def first(given: float | None, default: float) -> float:
        return default if given is None else given

    churn = Churn(
        first(settings.churn, best.churn.amount),
        first(settings.churn_min, best.churn.least),
        first(settings.churn_max, best.churn.most),
        first(settings.churn_noise, best.churn.scale),
    )
    return Tuned(first(settings.guidance, best.guidance), churn)
