"""What RAPID samples with: the parts of a stored bundle, or of a private run that has not written its bundle yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rapid.bundle import Bundle
from rapid.bundle.format import Kind
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.guidance import NAME as LEVELS
from rapid.methods.rapid.guidance import GuidanceLevels
from rapid.methods.rapid.knowledge_base import Retrieval, open_retrieval, public_denoiser_name
from rapid.methods.rapid.moments import NAME as MOMENTS
from rapid.methods.rapid.objectives import trained_timesteps
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser
from rapid.probe.network import COMPONENT as PROBE
from rapid.probe.network import Probe
from rapid.tones.curve import ToneCurve, stored_tones


@dataclass(frozen=True)
class Parts:
    """Networks, settings, and the knowledge base if there is one.

    Attributes:
        settings: of the bundle.
        kind: of the bundle.
        classes: names of the classes; empty for an unconditional model.
        image_shape: (H, W) or (H, W, 3).
        autoencoder: public.
        denoiser: the bundle's own.
        public_denoiser: of the early steps; in a public bundle the same.
        retrieval: public encoder and knowledge base; None where retrieval is off.
        probe: with a linear layer for the private classes; None in a public bundle and where none was trained.
        moments: of the private classes; None where they were not released.
        tones: the curve of generated images; None where none was fitted.
        levels: how far each class is guided; None where that was not found.
        private_from: the highest timestep for which the bundle's own denoiser is used; above it the public one is.
    """

    settings: RapidSettings
    kind: Kind
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]
    autoencoder: Autoencoder
    denoiser: Denoiser
    public_denoiser: Denoiser
    retrieval: Retrieval | None
    probe: Probe | None
    moments: ClassMoments | None
    private_from: int
    tones: ToneCurve | None = None
    levels: GuidanceLevels | None = None

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """Open the parts of a bundle."""
        private, settings = bundle.config.kind == "private", bundle.settings_as(RapidSettings)
        probe = bundle.component(PROBE, Probe) if private and bundle.has(PROBE) else None
        # without a probe nothing was distilled
        late = private and not ("after" in settings.private.distillation.times and probe is not None)
        return cls(
            settings=settings,
            kind=bundle.config.kind,
            classes=bundle.classes,
            image_shape=bundle.image_shape,
            autoencoder=bundle.component("autoencoder", Autoencoder),
            denoiser=bundle.component("denoiser", Denoiser),
            public_denoiser=bundle.component(public_denoiser_name(bundle), Denoiser),
            retrieval=open_retrieval(bundle),
            probe=probe,
            moments=bundle.component(MOMENTS, ClassMoments) if bundle.has(MOMENTS) else None,
            private_from=trained_timesteps(settings) if late else settings.schedule.timesteps,
            tones=stored_tones(bundle),
            levels=bundle.component(LEVELS, GuidanceLevels) if bundle.has(LEVELS) else None,
        )
