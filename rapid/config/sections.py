"""Typed, frozen settings; `rapid.config.presets` makes them of presets and `--set`.

The sections `image` to `probe` describe the public stage and are fixed in a public bundle; `private` describes
the mechanism of `train-private`; `generation` is how a bundle is sampled when nothing else is asked for.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PUBLIC_SECTIONS = (
    "image",
    "split",
    "augmentations",
    "schedule",
    "autoencoder",
    "denoiser",
    "retrieval",
    "encoder",
    "knowledge_base",
    "probe",
)


class Section(BaseModel):
    """Base of all settings: immutable, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Training(Section):
    """How one public network is trained."""

    steps: int = Field(1000, ge=1)
    batch_size: int = Field(128, ge=2)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(50, ge=0, description="linear rise of the learning rate; it falls to 0 by a cosine")
    ema_decay: float = Field(0.999, ge=0, lt=1)


class ImageSettings(Section):
    """The form into which every image is brought before the autoencoder sees it."""

    size: int = Field(32, ge=4, description="height and width in pixels")
    channels: Literal[1, 3] = 1
    fit: Literal["pad", "resize"] = Field("pad", description="pad with black, centred, or resize (bicubic)")


class SplitSettings(Section):
    """Disjoint parts of the public images: D_pre trains the networks, D_ref fills the knowledge base."""

    reference: float = Field(0.2, gt=0, lt=1, description="share of the public images in D_ref")
    seed: int = Field(0, ge=0)


class AugmentSettings(Section):
    """A random view of an image; the defaults suit letters and digits."""

    rotate: float = Field(10.0, ge=0, description="degrees, uniform in +-")
    size: float = Field(1.0, gt=0, description="middle of the relative size")
    scale: float = Field(0.15, ge=0, lt=1, description="relative size over its middle, uniform in 1 +-")
    shift: float = Field(0.08, ge=0, lt=1, description="share of the side, uniform in +-")
    flip: bool = Field(False, description="mirror left to right: not for letters")
    brightness: float = Field(0.0, ge=0, lt=1, description="relative gain, uniform in 1 +-")


class AugmentationSettings(Section):
    """Random views of the public images, the public sets in equal parts: more variety, where there are few images."""

    training: int = Field(0, ge=0, description="views of D_pre for the denoiser; 0: the images as they are")
    reference: int = Field(0, ge=0, description="views of D_ref in the knowledge base; 0: the images as they are")
    augment: AugmentSettings = AugmentSettings()


class ScheduleSettings(Section):
    """The variance schedule, "scaled linear": beta_t = (linear from sqrt(start) to sqrt(end)) squared."""

    timesteps: int = Field(1000, ge=2, description="T")
    beta_start: float = Field(0.0015, gt=0, lt=1)
    beta_end: float = Field(0.0155, gt=0, lt=1)


class AutoencoderSettings(Section):
    """KL autoencoder (diffusers AutoencoderKL), or `none` to diffuse pixels."""

    kind: Literal["kl", "none"] = "kl"
    patch: int = Field(1, ge=1, description="pixels of patch x patch become channels first: faster, for small machines")
    latent_channels: int = Field(3, ge=1)
    channels: int = Field(32, ge=1)
    multipliers: tuple[int, ...] = (1, 2, 2)
    blocks: int = Field(1, ge=1, description="residual blocks at each resolution")
    attention: tuple[int, ...] = Field((), description="resolutions with self-attention; if any, the middle block too")
    kl_weight: float = Field(1e-6, ge=0)
    training: Training = Training()

    @property
    def reduction(self) -> int:
        """Side of an image over side of its latent."""
        return 1 if self.kind == "none" else self.patch << (len(self.multipliers) - 1)


class DenoiserSettings(Section):
    """The U-Net eps_theta(x_t, t, label), conditioned by an added embedding or by cross-attention."""

    channels: int = Field(32, ge=1)
    multipliers: tuple[int, ...] = (1, 2)
    blocks: int = Field(1, ge=1)
    attention: tuple[bool, ...] = Field((True, True), description="attention at each resolution, finest first")
    heads: int = Field(4, ge=1, description="attention heads; with embedding, those of the finest resolution")
    transformer_depth: int = Field(1, ge=1, description="transformer layers an attention block, for cross-attention")
    conditioning: Literal["embedding", "cross-attention"] = "embedding"
    context_dim: int = Field(5, ge=1, description="width of the class embedding for cross-attention")
    label_dropout: float = Field(0.1, ge=0, le=1, description="share of examples trained with the null class")
    training: Training = Training()

    @model_validator(mode="after")
    def _same_depth(self) -> Self:
        if len(self.attention) != len(self.multipliers):
            raise ValueError("attention needs one entry for each of multipliers")
        if self.channels % self.heads:
            raise ValueError(f"channels ({self.channels}) must be divisible by heads ({self.heads})")
        return self


class RetrievalSettings(Section):
    """The two timesteps of retrieval: the query is made at k, and sampling goes on from the value of v."""

    k: int = Field(800, ge=1)
    v: int = Field(200, ge=1)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.k <= self.v:
            raise ValueError(f"k must be larger than v (k={self.k}, v={self.v})")
        return self


class EncoderSettings(Section):
    """The trajectory encoder h: one-step-denoised latents of step k to unit vectors, trained by InfoNCE."""

    channels: int = Field(32, ge=1)
    features: int = Field(64, ge=2)
    temperature: float = Field(0.1, gt=0)
    augment: AugmentSettings = AugmentSettings()
    training: Training = Training()


class KnowledgeBaseSettings(Section):
    """How the knowledge base is searched and built."""

    index_type: Literal["flat", "hnsw", "ivf"] = "flat"
    batch_size: int = Field(1000, ge=1, description="images encoded at a time")


class ProbeSettings(Section):
    """The probe: features from the classes of public images, on which a linear layer is trained privately."""

    enabled: bool = Field(True, description="train one if the public images have labels")
    channels: int = Field(32, ge=1)
    features: int = Field(256, ge=2, description="principal components of the trunk's outputs")
    augment: AugmentSettings = AugmentSettings(rotate=15.0, scale=0.2)
    training: Training = Training(steps=2500, ema_decay=0.998)


class PrivateProbeSettings(Section):
    """Private training of the probe's linear layer: all images in every step, gradient descent with momentum."""

    share: float = Field(0.4, ge=0, lt=1, description="of epsilon that it would spend by itself; 0: no probe")
    steps: int = Field(500, ge=1)
    clip_norm: float = Field(0.1, gt=0)
    weight_noise: float = Field(
        2.0, gt=0, description="standard deviation that the noise of all steps gives a weight: sets the learning rate"
    )


class OverlapSettings(Section):
    """The check that no private images are among the public ones, before anything is trained."""

    share: float = Field(0.05, ge=0, lt=1, description="of epsilon that it would spend by itself; 0: no check")


class PrivateSettings(Section):
    """The private stage (Algorithm 2). Only public numbers: nothing here may be derived from private images."""

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
        description="nearest entries of a query, of which one is drawn, in training as in sampling; 1: the paper",
    )
    expected_batch: int = Field(1024, ge=1)
    steps: int = Field(500, ge=1)
    clip_norm: float = Field(1.0, gt=0)
    learning_rate: float = Field(1e-3, gt=0)
    ema_decay: float = Field(0.99, ge=0, lt=1)
    label_dropout: float = Field(0.0, ge=0, le=1, description="share of examples trained with the null class")
    trainable: tuple[str, ...] = Field(("*",), description="patterns of the parameter names that are trained")
    optimizer: Literal["adam", "momentum"] = Field("adam", description="momentum: gradient descent, momentum 0.9")
    probe: PrivateProbeSettings = PrivateProbeSettings()
    overlap: OverlapSettings = OverlapSettings()
    multiplicity: int = Field(
        1, ge=1, description="draws of noise and timestep averaged for each image, before clipping"
    )
    group_size: int = Field(1, ge=1, description="images of one person, for whom epsilon is told too")
    noise_source: Literal["chacha20", "device"] = Field(
        "chacha20", description="chacha20: a stream cipher; device: the GPU's own generator, faster, not cryptographic"
    )
    physical_batch: int = Field(256, ge=1, description="draws in memory at a time: never changes what is released")
    checkpoint_seconds: float = Field(60.0, ge=0, description="how often the training state is saved")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the network's forward and backward pass; clipped sums and noise are float32"
    )


class GenerationSettings(Section):
    """How images are sampled."""

    sampler: Literal["ddim", "pndm", "dpm-solver++"] = "ddim"
    steps: int = Field(
        100,
        ge=1,
        description="network calls from T to 0 if nothing were skipped; T // steps apart: a rest makes more of them",
    )
    retrieval: Literal["query", "class", "none"] = Field(
        "query",
        description="how the start of the late steps is found: by a query of step k (the paper), or an entry of a "
        "public class that looks like the wanted one (no early steps; without a probe: query); none: from noise",
    )
    guidance: float = Field(
        1.0, ge=0, description="classifier-free guidance scale, 1 is off; train with label_dropout > 0"
    )
    start: int | None = Field(
        None,
        ge=1,
        description="timestep, retrieval.v to private.start, at which images begin; None: where training did",
    )
    epsilon_scale: float = Field(
        1.0, gt=0, description="the noise that is predicted is divided by this; more than 1: more varied, less clean"
    )
    attempts: int = Field(8, ge=1, description="candidates for an image, on average and at most; 1: no probe")
    batch_size: int = Field(256, ge=1)


class Settings(Section):
    """All settings of a bundle."""

    preset: str = "letters-mnist"
    image: ImageSettings = ImageSettings()
    split: SplitSettings = SplitSettings()
    augmentations: AugmentationSettings = AugmentationSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    autoencoder: AutoencoderSettings = AutoencoderSettings()
    denoiser: DenoiserSettings = DenoiserSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    encoder: EncoderSettings = EncoderSettings()
    knowledge_base: KnowledgeBaseSettings = KnowledgeBaseSettings()
    probe: ProbeSettings = ProbeSettings()
    private: PrivateSettings = PrivateSettings()
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
        begin = self.generation.start
        if begin is not None and not self.retrieval.v <= begin <= self.late_start:
            raise ValueError(
                f"generation.start must lie in {self.retrieval.v}..{self.late_start} (retrieval.v to where the late "
                f"steps begin), not {begin}"
            )
        if self.generation.steps > T:
            raise ValueError(f"generation.steps must be at most {T} (schedule.timesteps), not {self.generation.steps}")
        if self.image.size % self.autoencoder.reduction:
            raise ValueError(
                f"image.size must be divisible by {self.autoencoder.reduction}, the autoencoder's reduction"
            )
        factor = 2 ** (len(self.denoiser.multipliers) - 1)
        if self.latent_size % factor:
            raise ValueError(
                f"denoiser.multipliers halve the latent side {self.latent_size} {len(self.denoiser.multipliers) - 1} "
                f"times: it must be divisible by {factor}"
            )
        return self

    @property
    def late_start(self) -> int:
        """The timestep at which the late steps begin: v, unless `private.start` says otherwise."""
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
