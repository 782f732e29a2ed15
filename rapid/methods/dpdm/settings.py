"""DPDM's settings: network, the two stages, and sampling."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rapid.config.sections import (
    DenoiserSettings,
    DpSgdSettings,
    ImageSettings,
    MethodSettings,
    Multipliers,
    RateSchedule,
    SamplingSettings,
    Section,
    TonesSettings,
    Training,
    ViewSettings,
)
from rapid.diffusion.preconditioning import SIGMA_DATA, SIGMA_MAX, SIGMA_MIN, Configuration
from rapid.diffusion.samplers import SamplerName
from rapid.methods.dpdm.tuned import TUNED, Aim, Data

MAX_STEPS = 1000


class NetworkSettings(Section):
    """The U-Net on pixels, with group normalisation; the class embedding is added to that of the noise level."""

    patch: int = Field(2, ge=1, description="pixels of patch x patch are channels of the U-Net: faster, less fine")
    channels: int = Field(32, ge=1)
    multipliers: Multipliers = (1, 2)
    blocks: int = Field(1, ge=1, description="residual blocks at each resolution")
    attention: tuple[bool, ...] = Field((False, True), description="attention at each resolution, finest first")
    heads: int = Field(4, ge=1, description="attention heads, at the finest resolution")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # its rules are those of any denoiser
        _ = self.denoiser
        return self

    @property
    def denoiser(self) -> DenoiserSettings:
        """The same for `rapid.nn.Denoiser`."""
        return DenoiserSettings(
            channels=self.channels,
            multipliers=self.multipliers,
            blocks=self.blocks,
            attention=self.attention,
            heads=self.heads,
        )


class AmplifierSettings(Section):
    """The public stage: an EDM of public images alone, which makes more of a few. Private training does not use it."""

    sigma_data: float = Field(SIGMA_DATA, gt=0, description="standard deviation of pixels: a constant")
    label_dropout: float = Field(
        0.1, ge=0, le=1, description="share of images trained with the null class, which guidance needs"
    )
    views: ViewSettings = ViewSettings()
    training: Training = Training(steps=3000, batch_size=64, learning_rate=1e-3, warmup_steps=100, ema_decay=0.998)


class DpdmPrivateSettings(DpSgdSettings):
    """The private stage (Algorithm 1); multiplicity is K."""

    expected_batch: int = Field(1024, ge=1)
    steps: int = Field(320, ge=1)
    multiplicity: int = Field(1, ge=1, description="draws of noise and its level averaged for each image: K")
    learning_rate: float = Field(2e-3, gt=0)
    learning_rate_schedule: RateSchedule = Field(
        "cosine", description="constant: the paper; cosine: a short warm-up, then down to a tenth"
    )
    ema_decay: float = Field(0.98, ge=0, lt=1)
    configuration: Literal["auto"] | Configuration = Field(
        "auto", description="preconditioning and noise levels; auto: v up to epsilon 0.447, then edm"
    )
    sigma_data: float = Field(
        SIGMA_DATA,
        gt=0,
        description="standard deviation of pixels for edm: a constant, never measured on private images",
    )
    level_scale: float = Field(
        1.0,
        gt=0,
        description="noise levels in training are those of the configuration times this; above 1, short trainings "
        "learn shapes and classes before details",
    )
    label_dropout: float = Field(
        0.1, ge=0, le=1, description="share of draws trained with the null class, which guidance needs"
    )
    tones: TonesSettings = TonesSettings()

    @model_validator(mode="before")
    @classmethod
    def _as_recorded(cls, given: Any) -> Any:
        # bundles of the development of 0.3 name the schedule otherwise
        if not isinstance(given, dict) or "decay" not in given:
            return given
        rest = {name: value for name, value in given.items() if name != "decay"}
        return rest | {"learning_rate_schedule": "constant" if given["decay"] == "none" else given["decay"]}


class DpdmGenerationSettings(SamplingSettings):
    """How images are sampled.

    Settings that are null have the values that the paper found best; in a public bundle guidance and churn are then 0.
    """

    attempts: int = Field(1, ge=1, le=1, description="there is no probe: every candidate is an image")
    sampler: SamplerName = Field("churn", description="churn: Heun's method with added noise")
    steps: int = Field(
        18, ge=1, le=MAX_STEPS, description="noise levels; with churn 2 steps - 1 network calls, otherwise as many"
    )
    last_level: float = Field(
        SIGMA_MIN,
        gt=0,
        lt=SIGMA_MAX,
        description="lowest noise level; the image is what is denoised at it. A higher one leaves out details, and the "
        "noise of a denoiser that has not learnt them",
    )
    aim: Aim = Field(
        "downstream", description="what null settings were best for: likeness by FID, or training of classifiers"
    )
    data: Data = Field("mnist", description="images, of the paper's, for which null settings were best")
    guidance: float | None = Field(
        None,
        ge=0,
        description="w of (1 + w) D(label) - w D(null), as in the paper's tables: 0 is off, else a network call is for "
        "two images. The guidance of rapid and dp-diffusion is 1 + w",
    )
    churn: float | None = Field(None, ge=0, description="S_churn, the amount of noise that is added, over all steps")
    churn_min: float | None = Field(None, ge=0, description="S_min, the lowest noise level at which it is added")
    churn_max: float | None = Field(None, gt=0, description="S_max, the highest")
    churn_noise: float | None = Field(None, gt=0, description="S_noise, its standard deviation")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if (self.aim, self.data) not in TUNED:
            raise ValueError(
                f"the paper has no best settings for {self.aim} on {self.data}; choose another aim or data"
            )
        return self


class DpdmSettings(MethodSettings):
    """All settings."""

    public_sections: ClassVar[tuple[str, ...]] = ("image", "network", "public")

    method: Literal["dpdm"] = "dpdm"
    image: ImageSettings = ImageSettings()
    network: NetworkSettings = NetworkSettings()
    public: AmplifierSettings = AmplifierSettings()
    private: DpdmPrivateSettings = DpdmPrivateSettings()
    generation: DpdmGenerationSettings = DpdmGenerationSettings()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        factor = self.network.patch << (len(self.network.multipliers) - 1)
        if self.image.size % factor:
            raise ValueError(
                f"image.size must be divisible by {factor}: network.patch times 2 for each multiplier after the first"
            )
        if self.generation.guidance and not self.private.label_dropout:
            raise ValueError("generation.guidance needs private.label_dropout above 0")
        if self.public.views.shift >= self.image.size:
            raise ValueError(
                f"public.views.shift must be less than image.size ({self.image.size}), not {self.public.views.shift}"
            )
        return self

    @property
    def denoiser(self) -> DenoiserSettings:
        """The U-Net."""
        return self.network.denoiser

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.image.channels, self.image.size, self.image.size

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """What the U-Net sees: (C, H, W) of images whose patches became channels."""
        side = self.image.size // self.network.patch
        return self.image.channels * self.network.patch**2, side, side
