"""RAPID's settings: the shared sections, and retrieval, trajectory encoder, knowledge base, objective and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rapid.config.sections import (
    AugmentationSettings,
    AugmentSettings,
    AutoencoderSettings,
    DenoiserSettings,
    DpSgdSettings,
    ImageSettings,
    MethodSettings,
    OverlapSettings,
    PrivateProbeSettings,
    ProbeSettings,
    ScheduleSettings,
    Section,
    SplitSettings,
    TonesSettings,
    Training,
)
from rapid.methods.rapid.distillation_settings import DistillationSettings
from rapid.methods.rapid.generation_settings import WITHOUT_RECORDS, GenerationSettings


class RetrievalSettings(Section):
    """Retrieval and its two timesteps: the query is made at k, and sampling continues from the value at v."""

    enabled: bool = Field(
        True,
        description="false: the public stage makes neither trajectory encoder nor knowledge base, which the objectives "
        "late and ldm do without; images begin from moments or noise",
    )
    k: int = Field(800, ge=1)
    v: int = Field(200, ge=1)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.k <= self.v:
            raise ValueError(f"k must be larger than v (k={self.k}, v={self.v})")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the default of `enabled`, which the records of earlier versions do not name."""
        found: dict[str, Any] = handler(self)
        if self.enabled:
            found.pop("enabled", None)
        return found


class EncoderSettings(Section):
    """The trajectory encoder h: maps one-step-denoised latents of step k to unit vectors, trained by InfoNCE."""

    channels: int = Field(32, ge=1)
    features: int = Field(64, ge=2)
    temperature: float = Field(0.1, gt=0)
    augment: AugmentSettings = AugmentSettings()
    training: Training = Training()


class KnowledgeBaseSettings(Section):
    """How the knowledge base is searched and built."""

    index_type: Literal["flat", "hnsw", "ivf"] = "flat"
    batch_size: int = Field(1000, ge=1, description="images encoded at a time")


class SubspaceSettings(Section):
    """The public directions of latents in which the moments of private images are released."""

    dimensions: int = Field(64, ge=1)
    examples: int = Field(
        0, ge=0, le=8192, description="latents of public images that are kept, for private.moments.warmup_on=public"
    )


class MomentsSettings(Section):
    """Class means and a covariance of private latents, released once; images can begin from them."""

    share: float = Field(0.0, ge=0, lt=1, description="of epsilon that they would spend by themselves; 0: no moments")
    covariance: Literal["auto", "shared", "class"] = Field(
        "auto",
        description="of all classes together, or of each; auto: of each where its noise is small, by N and epsilon",
    )
    warmup_on: Literal["gaussian", "public"] = Field(
        "gaussian",
        description="latents of the warm-up: drawn from the moments, or of public images, moved to have the moments",
    )
    warmup: Training = Field(
        Training(steps=300, batch_size=256, learning_rate=5e-4, ema_decay=0.98),
        description="training on such latents before DP-SGD, at no privacy cost",
    )
    warmup_from: int = Field(300, ge=1, description="lowest timestep of the warm-up: lower ones show what moments lack")


class RapidPrivateSettings(DpSgdSettings):
    """The private stage (Algorithm 2)."""

    objective: Literal["rapid", "late", "ldm"] = Field(
        "rapid",
        description="rapid: Eq. 5 from retrieved values; late: t <= v with Gaussian noise; ldm: all t, plain loss",
    )
    start: int | None = Field(
        None,
        ge=1,
        description="timestep, v or more, at which the late steps begin: retrieved values are diffused on from v to it",
    )
    neighbours: int = Field(
        1,
        ge=1,
        description="nearest records of a query, of which one is drawn, in training as in sampling; 1: the paper",
    )
    label_dropout: float = Field(0.0, ge=0, le=1, description="share of examples trained with the null class")
    probe: PrivateProbeSettings = PrivateProbeSettings()
    overlap: OverlapSettings = OverlapSettings()
    moments: MomentsSettings = MomentsSettings()
    distillation: DistillationSettings = DistillationSettings()
    tones: TonesSettings = TonesSettings()


class LatentDenoiserSettings(DenoiserSettings):
    """The denoiser of latents."""

    prediction: Literal["noise", "velocity"] = Field(
        "noise",
        description="noise: the U-Net predicts the noise, as in the paper; velocity: a mixture of noise and latent, so "
        "that its errors are not magnified where noise is high, for networks that are small or trained for minutes",
    )


class RapidSettings(MethodSettings):
    """All settings of a RAPID bundle.

    The public sections describe the public stage and are fixed in a public bundle; `private` describes the private
    stage, `generation` the default settings of sampling.
    """

    public_sections: ClassVar[tuple[str, ...]] = (
        "image",
        "split",
        "augmentations",
        "schedule",
        "autoencoder",
        "denoiser",
        "subspace",
        "retrieval",
        "encoder",
        "knowledge_base",
        "probe",
    )

    method: Literal["rapid"] = "rapid"
    preset: str = "letters-mnist"
    image: ImageSettings = ImageSettings()
    split: SplitSettings = SplitSettings()
    augmentations: AugmentationSettings = AugmentationSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    autoencoder: AutoencoderSettings = AutoencoderSettings()
    denoiser: LatentDenoiserSettings = LatentDenoiserSettings()
    subspace: SubspaceSettings = SubspaceSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    encoder: EncoderSettings = EncoderSettings()
    knowledge_base: KnowledgeBaseSettings = KnowledgeBaseSettings()
    probe: ProbeSettings = ProbeSettings()
    private: RapidPrivateSettings = RapidPrivateSettings()
    generation: GenerationSettings = GenerationSettings()

    @model_validator(mode="after")
    def _timesteps(self) -> Self:
        T = self.schedule.timesteps
        if self.retrieval.k > T:
            raise ValueError(f"retrieval.k must lie in 1..{T} (schedule.timesteps), not {self.retrieval.k}")
        if self.private.start is not None and not self.retrieval.v <= self.private.start <= T:
            raise ValueError(
                f"private.start must lie in retrieval.v..schedule.timesteps ({self.retrieval.v}..{T}), "
                f"not {self.private.start}"
            )
        if not self.retrieval.enabled and self.private.objective == "rapid":
            raise ValueError(
                "private.objective must be late or ldm without a knowledge base (retrieval.enabled=false), not rapid"
            )
        self._check_sampling("generation", self.generation)
        if self.private.distillation.sampling is not None:
            self._check_sampling("private.distillation.sampling", self.private.distillation.sampling)
        if self.image.size % self.autoencoder.reduction:
            raise ValueError(
                f"image.size must be divisible by {self.autoencoder.reduction}, the autoencoder's reduction"
            )
        numbers = self.image.channels * self.autoencoder.patch**2
        if self.autoencoder.kind == "linear" and self.autoencoder.latent_channels > numbers:
            raise ValueError(
                f"autoencoder.latent_channels must be at most {numbers}, the numbers of a patch, with kind linear"
            )
        factor = 2 ** (len(self.denoiser.multipliers) - 1)
        if self.latent_size % factor:
            raise ValueError(
                f"denoiser.multipliers halve the latent side {self.latent_size} {len(self.denoiser.multipliers) - 1} "
                f"times: it must be divisible by {factor}"
            )
        return self

    def _check_sampling(self, name: str, own: GenerationSettings) -> None:
        T = self.schedule.timesteps
        if own.uses_records and not self.retrieval.enabled:
            raise ValueError(f"{name}.retrieval {WITHOUT_RECORDS}, not {own.retrieval}")
        if own.start is not None and not self.retrieval.v <= own.start <= self.late_start:
            raise ValueError(
                f"{name}.start must lie in {self.retrieval.v}..{self.late_start} (retrieval.v to where the late "
                f"steps begin), not {own.start}"
            )
        start = T if own.retrieval == "none" else own.start or self.late_start
        if own.public_below > start:
            raise ValueError(
                f"{name}.public_below must be at most {start} (where images begin), not {own.public_below}"
            )
        if own.steps > T:
            raise ValueError(f"{name}.steps must be at most {T} (schedule.timesteps), not {own.steps}")

    def for_private_run(self, overrides: Sequence[str]) -> Self:
        """The objective `ldm` trains every timestep, so retrieval need not skip any when sampling."""
        if (
            self.private.objective != "ldm"
            or self.generation.retrieval == "moments"
            or any(o.startswith("generation.retrieval=") for o in overrides)
        ):
            return self
        tree = self.model_dump(mode="json")
        tree["generation"]["retrieval"] = "none"
        return type(self).model_validate(tree)

    @property
    def late_start(self) -> int:
        """The timestep at which the late steps begin: `private.start` if it is set, or else v."""
        return self.private.start or self.retrieval.v

    @property
    def latent_size(self) -> int:
        """Height and width of a latent."""
        return self.image.size // self.autoencoder.reduction

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return self.image.channels if self.autoencoder.kind == "none" else self.autoencoder.latent_channels

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a latent."""
        return (self.latent_channels, self.latent_size, self.latent_size)
