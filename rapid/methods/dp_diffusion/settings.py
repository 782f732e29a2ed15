"""Settings of DP diffusion: the pixel diffusion, its public pre-training, its private fine-tuning, and sampling."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rapid.config.sections import (
    DenoiserSettings,
    DpSgdSettings,
    ImageSettings,
    MethodSettings,
    Multipliers,
    OverlapSettings,
    RateSchedule,
    SamplingSettings,
    ScheduleSettings,
    Section,
    TonesSettings,
    ViewSettings,
)


class LinearScheduleSettings(ScheduleSettings):
    """The variance schedule: beta_t is linear in t. The defaults are those of DDPM; the paper names none."""

    beta_start: float = Field(1e-4, gt=0, lt=1)
    beta_end: float = Field(0.02, gt=0, lt=1)

    def beta(self, way: float) -> float:
        """Of the timestep that is this share of the way from the first to the last."""
        return (1 - way) * self.beta_start + way * self.beta_end


class MixtureSettings(Section):
    """Which timesteps a loss is computed at: uniform within each part, and each part with its weight."""

    weights: tuple[float, ...] = Field((0.03, 0.77, 0.2), description="of the parts; they add up to 1")
    breaks: tuple[int, ...] = Field(
        (0, 30, 800, 1000), description="part i is b_i + 1..b_(i+1): from 0, ascending, the last is schedule.timesteps"
    )

    @model_validator(mode="after")
    def _parts(self) -> Self:
        if len(self.breaks) != len(self.weights) + 1:
            raise ValueError("breaks needs one entry more than weights")
        if self.breaks[0] != 0 or any(a >= b for a, b in zip(self.breaks, self.breaks[1:], strict=False)):
            raise ValueError("breaks must ascend from 0")
        if min(self.weights) < 0 or not math.isclose(sum(self.weights), 1, abs_tol=1e-6):
            raise ValueError("weights must be at least 0 and add up to 1")
        return self


class PixelDenoiserSettings(DenoiserSettings):
    """The U-Net eps_theta(x_t, t, label) on pixels; the defaults suit small images on two CPU cores."""

    multipliers: Multipliers = (1, 2, 2)
    attention: tuple[bool, ...] = Field(
        (False, True, False), description="attention at each resolution, finest first; if any, in the middle, too"
    )
    heads: int = Field(2, ge=1, description="attention heads; with embedding, those of the finest resolution")
    patch: int = Field(
        2, ge=1, description="pixels of patch x patch become channels of the U-Net: the same pixels, in less time"
    )
    adaptive_norm: bool = Field(
        False,
        description="timestep and class scale and shift the normalised channels; false: they are added before. The "
        "paper's text has true, the parameter counts of its tables have false",
    )
    conditional: bool = Field(True, description="learn the classes of the public images, if they have labels")
    pretrained: bool = Field(
        True, description="false: random weights, to train privately from scratch, which needs no public images"
    )


class DpDiffusionPrivateSettings(DpSgdSettings):
    """The private stage (Algorithm 1): each of the K draws of an image has its own view, timestep and noise."""

    clip_norm: float = Field(1e-3, ge=1e-8)
    ema_decay: float = Field(0.9999, ge=0, lt=1, description="most; it rises as (1 + n) / (10 + n) at step n")
    multiplicity: int = Field(
        4, ge=1, description="draws of view, timestep and noise averaged for each image, before clipping"
    )
    learning_rate_schedule: RateSchedule = Field(
        "constant", description="constant: the paper; cosine: a short warm-up, then down to a tenth"
    )
    timesteps: MixtureSettings = MixtureSettings(weights=(0.015, 0.785, 0.2), breaks=(0, 30, 600, 1000))
    label_dropout: float = Field(
        0.0, ge=0, le=1, description="share of draws trained with the null class, for guidance; the paper has none"
    )
    views: ViewSettings = ViewSettings()
    overlap: OverlapSettings = OverlapSettings()
    tones: TonesSettings = TonesSettings()


class PixelSamplingSettings(SamplingSettings):
    """How images are sampled."""

    sampler: Literal["ddim", "pndm", "dpm-solver++"] = "dpm-solver++"
    steps: int = Field(20, ge=1, description="network calls from T to 0; T // steps apart: a rest makes more of them")
    guidance: float = Field(
        1.0,
        ge=0,
        description="classifier-free guidance, s of eps(null) + s (eps(label) - eps(null)): 1 is off (in dpdm: 0). In "
        "the paper it made images worse; train with private.label_dropout > 0",
    )
    attempts: int = Field(1, ge=1, le=1, description="candidates for an image: there is no probe to choose among them")
    clip_range: float | None = Field(
        1.0,
        gt=0,
        description="denoised pixels, of -1 to 1, are clipped to +- this number in every step: small errors of the "
        "network become large ones where noise dominates; None: not clipped",
    )


class DpDiffusionSettings(MethodSettings):
    """All settings of a DP-diffusion bundle.

    With a public bundle, the public sections are fixed by it; without one (`denoiser.pretrained=false`), they are those
    of the run. `private` describes the private stage, `generation` the default settings of sampling.
    """

    public_sections: ClassVar[tuple[str, ...]] = ("image", "views", "schedule", "timesteps", "denoiser")

    method: Literal["dp-diffusion"] = "dp-diffusion"
    preset: str = ""
    image: ImageSettings = ImageSettings()
    views: ViewSettings = ViewSettings()
    schedule: LinearScheduleSettings = LinearScheduleSettings()
    timesteps: MixtureSettings = MixtureSettings()
    denoiser: PixelDenoiserSettings = PixelDenoiserSettings()
    private: DpDiffusionPrivateSettings = DpDiffusionPrivateSettings()
    generation: PixelSamplingSettings = PixelSamplingSettings()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        T = self.schedule.timesteps
        for name, mixture in (("timesteps", self.timesteps), ("private.timesteps", self.private.timesteps)):
            if mixture.breaks[-1] != T:
                raise ValueError(f"{name}.breaks must end at {T} (schedule.timesteps), not {mixture.breaks[-1]}")
        if self.generation.steps > T:
            raise ValueError(f"generation.steps must be at most {T} (schedule.timesteps), not {self.generation.steps}")
        factor = self.denoiser.patch << (len(self.denoiser.multipliers) - 1)
        if self.image.size % factor:
            raise ValueError(f"image.size must be divisible by {factor}: denoiser.patch, and a half for each level")
        for name, views in (("views", self.views), ("private.views", self.private.views)):
            if views.shift >= self.image.size:
                raise ValueError(f"{name}.shift must be less than image.size ({self.image.size}), not {views.shift}")
        return self

    @property
    def base_wanted(self) -> str:
        """See `MethodSettings`: fine-tuning begins from a public network."""
        return "denoiser.pretrained=true begins from a public network" if self.denoiser.pretrained else ""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image with its patches as channels."""
        patch = self.denoiser.patch
        return (self.image.channels * patch**2, self.image.size // patch, self.image.size // patch)
